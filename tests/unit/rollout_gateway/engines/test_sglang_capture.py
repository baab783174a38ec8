"""Hidden rows by KV slot, with hand-made substitutes for the objects that SGLang passes to the
hooks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.engines.nouns import Request, RowLayout
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.plugin import capture
from paceline.services.rollout_gateway.engines.sglang.plugin.process import Plugin
from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import (
    Gathered,
    SlotRows,
)
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec, row_layout
from paceline.services.rollout_gateway.engines.worker import WorkerSpec
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.trajectory import VersionSet

CPU = torch.device("cpu")
WIDTH = 4
SLOTS = 40


class FakePlugin:
    """The plugin's attributes that the hooks need, with one request per rid."""

    def __init__(self, *, width: int = WIDTH, layers: str = "last") -> None:
        self.rows: RowLayout | None = RowLayout(width, layers, "post_norm")
        self.slot_rows: SlotRows | None = SlotRows(SLOTS, width, torch.float32, CPU)
        self.memory = RowRing.create(64, 4 * width)
        self.ring: RowRing | None = self.memory
        self.versions = VersionSet(0, 7, 0)
        self.rows_invalid = 0
        self.rank = 0
        self.spec: Any = None
        self.arm = "eagle:1_2_3"
        self.batch: Any = None  # none is being run, so no prompt is scored
        self.scheduler: Any = None
        self.requests: dict[str, Any] = {}

    def track(self, number: int, *, captured: bool = True) -> str:
        request = Request(number, (1,), Sampling(0, 1), capture=captured)
        self.requests[f"paceline-{number}"] = SimpleNamespace(request=request)
        return f"paceline-{number}"

    def in_ring(self) -> RowArray:
        return self.memory.read(self.memory.rows_written)


@pytest.fixture
def plugin() -> FakePlugin:
    return FakePlugin()


def states(*values: float, width: int = WIDTH) -> Tensor:
    """Row i holds values[i] everywhere."""
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, width).contiguous()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def values_of(hidden: np.ndarray[Any, Any], width: int = WIDTH) -> list[float]:
    """First value of each row; all values of a row are equal."""
    rows = np.ascontiguousarray(hidden).view(np.float32).reshape(-1, width)
    assert (rows == rows[:, :1]).all()
    return [float(value) for value in rows[:, 0]]


def read(
    stored: SlotRows, slots: Sequence[int], tokens: Sequence[int]
) -> tuple[list[float], list[bool], list[int]]:
    hidden, valid, versions = stored.gather(ints(*slots), np.array(tokens, dtype=np.int32)).result()
    return values_of(hidden), valid.tolist(), versions.tolist()


class Mode:
    """SGLang's forward mode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend_without_speculative(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


def forward(
    plugin: FakePlugin,
    slots: Sequence[int],
    tokens: Sequence[int],
    first: int,
    hidden: Tensor | None,
    mode: str = "extend",
    draft: bool = False,
) -> Any:
    """One forward of neighbouring positions through the hook; returns SGLang's output object."""
    positions = torch.arange(first, first + len(tokens))
    batch = SimpleNamespace(
        out_cache_loc=ints(*slots),
        input_ids=ints(*tokens),
        positions=positions,
        forward_mode=Mode(mode),
    )
    output = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden))
    runner = SimpleNamespace(is_draft_worker=draft)
    return capture.forwarded(plugin, lambda *_: output, runner, batch)


def request_with(
    rid: str,
    prompt: Sequence[int],
    output: Sequence[int],
    slots: Sequence[int],
    *,
    finished: bool = True,
    committed: int | None = None,
) -> tuple[Any, Any]:
    """A request as SGLang releases it, and the cache that maps its slots."""
    row = torch.zeros(2, 16, dtype=torch.int32)
    row[1, : len(slots)] = ints(*slots)
    cache = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=row))
    length = len(slots) if committed is None else committed
    kv = SimpleNamespace(holds_kv=True, req_pool_idx=1, kv_committed_len=length)
    req = SimpleNamespace(
        rid=rid,
        origin_input_ids=list(prompt),
        output_ids_through_stop=list(output),
        finished=lambda: finished,
        kv=kv,
    )
    return req, cache


# ---- rows by slot


def test_rows_come_back_in_the_order_asked_for_with_their_versions() -> None:
    stored = SlotRows(SLOTS, WIDTH, torch.float32, CPU)
    stored.put(ints(9, 3), ints(50, 51), ints(0, 1), 4, states(1, 2))
    stored.put(ints(5), ints(52), ints(2), 6, states(3))
    assert read(stored, [9, 3, 5], [50, 51, 52]) == ([1, 2, 3], [True] * 3, [4, 4, 6])


def test_a_slot_filled_for_another_token_or_position_or_never_is_not_valid() -> None:
    stored = SlotRows(SLOTS, WIDTH, torch.float32, CPU)
    stored.put(ints(1, 2, 3), ints(50, 51, 52), ints(0, 1, 9), 0, states(1, 2, 3))
    _, valid, _ = read(stored, [1, 2, 3, 4], [50, 99, 52, 53])
    assert valid == [True, False, False, False]


def test_forgotten_rows_are_not_valid() -> None:
    stored = SlotRows(SLOTS, WIDTH, torch.float32, CPU)
    stored.put(ints(1, 2), ints(50, 51), ints(0, 1), 0, states(1, 2))
    stored.forget(ints(2))
    assert read(stored, [1, 2], [50, 51])[1] == [True, False]


def test_rows_are_kept_in_the_features_dtype() -> None:
    stored = SlotRows(SLOTS, WIDTH, torch.bfloat16, CPU)
    row = torch.tensor([[1.0, 1.001, 3.14159, -2.0]])
    stored.put(ints(1), ints(50), ints(0), 0, row)
    hidden, _, _ = stored.gather(ints(1), np.array([50], dtype=np.int32)).result()
    assert hidden.shape == (1, 2 * WIDTH)
    assert torch.equal(torch.from_numpy(hidden).view(torch.bfloat16), row.bfloat16())


def test_what_was_gathered_outlives_its_slots() -> None:
    stored = SlotRows(SLOTS, WIDTH, torch.float32, CPU)
    stored.put(ints(1), ints(50), ints(0), 0, states(1))
    gathered = stored.gather(ints(1), np.array([50], dtype=np.int32))
    stored.put(ints(1), ints(60), ints(5), 1, states(9))
    hidden, valid, versions = gathered.result()
    assert (values_of(hidden), valid.tolist(), versions.tolist()) == ([1], [True], [0])


def test_memory_is_that_of_the_pool_however_many_rows_pass() -> None:
    stored = SlotRows(SLOTS, WIDTH, torch.bfloat16, CPU)
    parts = (stored.hidden, stored.token, stored.position, stored.version, stored.unread)
    before = [part.data_ptr() for part in parts]
    for version in range(50):
        stored.put(
            torch.arange(SLOTS),
            torch.arange(SLOTS),
            torch.arange(SLOTS),
            version,
            torch.zeros(SLOTS, WIDTH),
        )
    assert [part.data_ptr() for part in parts] == before
    assert stored.nbytes == sum(part.numel() * part.element_size() for part in parts)
    assert stored.nbytes == (SLOTS + 1) * (2 * WIDTH + 4 + 4 + 8 + 1)


# ---- rows in


def test_a_prefill_and_a_decode_round_store_the_state_at_each_token(plugin: FakePlugin) -> None:
    forward(plugin, [4, 5, 6], [50, 51, 52], 0, states(1, 2, 3))
    plugin.versions = VersionSet(1, 8, 0)
    forward(plugin, [2], [53], 3, states(4), mode="decode")
    assert plugin.slot_rows is not None
    assert read(plugin.slot_rows, [4, 5, 6, 2], [50, 51, 52, 53]) == (
        [1, 2, 3, 4],
        [True] * 4,
        [7, 7, 7, 8],
    )


def test_the_drafters_own_forwards_and_a_verification_store_nothing(plugin: FakePlugin) -> None:
    forward(plugin, [4], [50], 0, states(1), draft=True)
    forward(plugin, [5], [51], 0, states(1), mode="target_verify")
    assert plugin.slot_rows is not None
    assert bool((plugin.slot_rows.version == -1).all())


def test_rows_that_do_not_match_the_tokens_one_to_one_are_forgotten(plugin: FakePlugin) -> None:
    forward(plugin, [4, 5], [50, 51], 0, states(1, 2))
    forward(plugin, [4, 5], [50, 51], 0, states(2))  # the last token's alone
    assert plugin.slot_rows is not None
    assert read(plugin.slot_rows, [4, 5], [50, 51])[1] == [False, False]
    forward(plugin, [6], [52], 0, None)
    assert read(plugin.slot_rows, [6], [52])[1] == [False]


def verify_trees(
    plugin: FakePlugin, hidden: Tensor, accept_index: list[list[int]], accept_lens: list[int]
) -> None:
    """Two requests of four nodes: root 0 with children 1 and 2, node 3 below 2.

    Positions 5.. and 8.. .
    """
    verify_input = SimpleNamespace(
        draft_token_num=4,
        draft_token=ints(10, 11, 12, 13, 20, 21, 22, 23),
        positions=ints(5, 6, 6, 7, 8, 9, 9, 10),
    )
    batch = SimpleNamespace(out_cache_loc=torch.arange(16, 24), forward_mode=Mode("verify"))
    index = torch.tensor(accept_index, dtype=torch.int32)
    lens = torch.tensor(accept_lens, dtype=torch.int32)
    predict = torch.zeros(8, dtype=torch.int32)
    output = SimpleNamespace(hidden_states=hidden)
    capture.verified(plugin, verify_input, batch, output, predict, lens, index)


def test_accepted_nodes_of_a_tree_land_in_the_front_slots_of_their_request(
    plugin: FakePlugin,
) -> None:
    hidden = states(100, 101, 102, 103, 200, 201, 202, 203)
    verify_trees(plugin, hidden, [[0, 2, 3], [4, -1, -1]], [3, 1])
    stored = plugin.slot_rows
    assert stored is not None
    assert values_of(stored.hidden[[16, 17, 18, 20]].view(torch.uint8).numpy()) == [
        100,
        102,
        103,
        200,
    ]
    assert stored.token[[16, 17, 18, 20]].tolist() == [10, 12, 13, 20]
    assert stored.position[[16, 17, 18, 20]].tolist() == [5, 6, 7, 8]
    assert stored.version[[16, 17, 18, 20]].tolist() == [7] * 4


@pytest.mark.parametrize(("arm", "unread"), [("off", True), ("eagle:1_2_3", False)])
def test_only_what_a_round_without_drafts_verifies_is_unread(
    plugin: FakePlugin, arm: str, unread: bool
) -> None:
    plugin.arm = arm
    verify_trees(plugin, states(*range(8)), [[0, 2, 3], [4, -1, -1]], [3, 1])
    assert plugin.slot_rows is not None
    assert plugin.slot_rows.unread[[16, 17, 18, 20]].tolist() == [unread] * 4
    assert not plugin.slot_rows.unread[[19, 21, 22, 23]].any()


def test_rejected_nodes_touch_no_slot(plugin: FakePlugin) -> None:
    forward(plugin, [19, 21], [60, 61], 0, states(1, 2))
    verify_trees(plugin, states(*range(8)), [[0, 2, 3], [4, -1, -1]], [3, 1])
    stored = plugin.slot_rows
    assert stored is not None
    assert read(stored, [19, 21], [60, 61]) == ([1, 2], [True, True], [7, 7])
    assert stored.version[[22, 23]].tolist() == [-1, -1]


def test_an_accept_index_deeper_than_the_tree_is_cut(plugin: FakePlugin) -> None:
    verify_trees(plugin, states(*range(8)), [[0, 2, 3, -1, -1, -1], [4, 5, -1, -1, -1, -1]], [3, 2])
    assert plugin.slot_rows is not None
    assert plugin.slot_rows.token[16:22].tolist() == [10, 12, 13, -1, 20, 21]


def test_a_verification_without_rows_of_every_node_is_forgotten(plugin: FakePlugin) -> None:
    verify_trees(plugin, states(*range(8)), [[0, 2, 3], [4, -1, -1]], [3, 1])
    verify_trees(plugin, states(1, 2), [[0, 2, 3], [4, -1, -1]], [3, 1])
    assert plugin.slot_rows is not None
    assert bool((plugin.slot_rows.version[16:24] == -1).all())


# ---- inner states


def test_an_eagle3_row_is_three_inner_states_and_the_last_and_the_drafter_gets_the_inner_ones() -> (
    None
):
    plugin = FakePlugin(width=8, layers="2,4,5,last")
    processor = SimpleNamespace()
    model = SimpleNamespace(
        layers=[],
        logits_processor=processor,
        set_eagle3_layers_to_capture=lambda named: model.layers.extend(named),
    )
    capture.model_loaded(plugin, None, SimpleNamespace(is_draft_worker=False, model=model))
    assert model.layers == [1, 3, 4]  # SGLang's spelling: the layer a state leaves

    def logits(_: Any, __: Any, ___: Any, ____: Any, _____: Any, inner: Any) -> Any:
        return torch.cat(list(inner), dim=-1)

    inner = [states(1, 2, width=2), states(3, 4, width=2), states(5, 6, width=2)]
    last = states(7, 8, width=2)
    packed = capture.add_last(plugin, logits, processor, None, last, None, None, inner)
    assert packed.tolist() == [[1, 1, 3, 3, 5, 5, 7, 7], [2, 2, 4, 4, 6, 6, 8, 8]]
    output = forward(plugin, [4, 5], [50, 51], 0, packed).logits_output
    assert torch.equal(output.hidden_states, packed[:, :6])
    assert output.hidden_states.is_contiguous()
    assert plugin.slot_rows is not None
    assert torch.equal(plugin.slot_rows.hidden[[4, 5]], packed)


def test_the_drafters_logits_are_left_alone(plugin: FakePlugin) -> None:
    inner = [states(1)]

    def same(*given: Any) -> Any:
        return given[5]

    assert (
        capture.add_last(plugin, same, SimpleNamespace(), None, states(2), None, None, inner)
        is inner
    )


def test_a_model_that_captures_other_layers_than_declared_is_refused() -> None:
    plugin = FakePlugin(width=8, layers="2,4,5,last")
    model = SimpleNamespace(model=SimpleNamespace(layers_to_capture=[1, 3, 4]))
    plugin.scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model))
    )
    with pytest.raises(ConfigError, match="other layers"):
        capture.start(plugin)


def spec_for(tmp_path: Path, layers: int, drafter: dict[str, Any] | None) -> SGLangSpec:
    for name, content in (
        ("model", {"hidden_size": 16, "num_hidden_layers": layers}),
        ("drafter", drafter or {}),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return SGLangSpec(
        model_dir=str(tmp_path / "model"), drafter=str(tmp_path / "drafter") if drafter else "ngram"
    )


def test_the_layout_follows_the_speculator(tmp_path: Path) -> None:
    eagle3: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"]}
    assert row_layout(spec_for(tmp_path, 28, None)) == RowLayout(16, "last", "post_norm")
    eagle = {"architectures": ["LlamaForCausalLMEagle"]}
    assert row_layout(spec_for(tmp_path, 28, eagle)) == RowLayout(16, "last", "post_norm")
    assert row_layout(spec_for(tmp_path, 28, eagle3)) == RowLayout(64, "2,14,25,last", "post_norm")
    eagle3["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 6, 20]}
    assert row_layout(spec_for(tmp_path, 28, eagle3)) == RowLayout(64, "1,7,21,last", "post_norm")


def test_a_model_too_shallow_for_eagle3_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EAGLE-3"):
        row_layout(spec_for(tmp_path, 4, {"architectures": ["LlamaForCausalLMEagle3"]}))


def test_an_eagle3_drafter_that_sglang_would_misread_is_refused(tmp_path: Path) -> None:
    drafter = {"architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": True}
    with pytest.raises(ConfigError, match="norm_before_residual"):
        row_layout(spec_for(tmp_path, 28, drafter))


# ---- rows out


def test_an_ended_request_leaves_a_row_for_every_token_but_the_last(plugin: FakePlugin) -> None:
    rid = plugin.track(3)
    forward(plugin, [4, 5, 6], [50, 51, 52], 0, states(1, 2, 3))
    forward(plugin, [7], [53], 3, states(4), mode="decode")
    capture.released(plugin, *request_with(rid, [50, 51, 52], [53, 54], [4, 5, 6, 7]))
    rows = plugin.in_ring()
    assert values_of(rows["hidden"]) == [1, 2, 3, 4]
    assert rows["position"].tolist() == [0, 1, 2, 3]
    assert rows["token_id"].tolist() == [50, 51, 52, 53]
    assert set(rows["request_id"].tolist()) == {3}
    assert set(rows["policy_version"].tolist()) == {7}
    assert plugin.rows_invalid == 0
    assert 3 not in {request for request, _ in plugin.slot_rows.leaving}


def test_a_prefix_served_from_the_cache_loses_no_row(plugin: FakePlugin) -> None:
    forward(
        plugin, [4, 5], [50, 51], 0, states(1, 2)
    )  # of an earlier request that was not captured
    rid = plugin.track(1)
    forward(plugin, [9], [52], 2, states(3))
    capture.released(plugin, *request_with(rid, [50, 51, 52], [53], [4, 5, 9]))
    assert values_of(plugin.in_ring()["hidden"]) == [1, 2, 3]


def test_rows_are_written_under_the_version_that_computed_them(plugin: FakePlugin) -> None:
    rid = plugin.track(1)
    forward(plugin, [4, 5], [50, 51], 0, states(1, 2))
    plugin.versions = VersionSet(1, 9, 0)
    forward(plugin, [6], [52], 2, states(3), mode="decode")
    capture.released(plugin, *request_with(rid, [50, 51], [52, 53], [4, 5, 6]))
    rows = plugin.in_ring()
    assert dict(zip(rows["position"].tolist(), rows["policy_version"].tolist(), strict=True)) == {
        0: 7,
        1: 7,
        2: 9,
    }
    assert dict(zip(rows["position"].tolist(), values_of(rows["hidden"]), strict=True)) == {
        0: 1,
        1: 2,
        2: 3,
    }


def test_rows_whose_stamps_do_not_fit_are_counted_and_not_written(plugin: FakePlugin) -> None:
    rid = plugin.track(1)
    forward(plugin, [4, 5, 6], [50, 51, 52], 0, states(1, 2, 3))
    forward(plugin, [5], [70], 0, states(9))  # another request took the slot
    capture.released(plugin, *request_with(rid, [50, 51, 52], [53], [4, 5, 6]))
    assert plugin.in_ring()["position"].tolist() == [0, 2]
    assert plugin.rows_invalid == 1


def test_rows_that_were_not_written_are_told_with_the_load() -> None:
    spec = {"model_dir": "unread"}
    whole = Plugin(WorkerSpec(worker_index=0, kind="sglang", engine=spec))
    whole.scheduler = SimpleNamespace(waiting_queue=[])
    assert whole.load.rows_invalid == 0
    whole.ring = RowRing.create(8, 4 * WIDTH)
    stored = SlotRows(SLOTS, WIDTH, torch.float32, CPU)
    stored.put(ints(4, 5, 6), ints(50, 51, 52), ints(0, 1, 2), 7, states(1, 2, 3))
    known = np.array([50, 99, 98], dtype=np.int32)  # other requests took two of the slots
    stored.leaving.append((1, stored.gather(ints(4, 5, 6), known)))
    whole.slot_rows = stored
    capture.drain(whole)
    assert (whole.load.rows_invalid, whole.ring.rows_written) == (2, 1)


def test_tokens_verified_beyond_the_stop_have_no_row(plugin: FakePlugin) -> None:
    rid = plugin.track(1)
    forward(plugin, [4, 5, 6, 7], [50, 51, 52, 53], 0, states(1, 2, 3, 4))
    capture.released(plugin, *request_with(rid, [50], [51, 52], [4, 5, 6, 7], committed=4))
    assert plugin.in_ring()["token_id"].tolist() == [50, 51]


@pytest.mark.parametrize("why", ["retracted", "not captured", "not ours", "released before"])
def test_nothing_leaves_of_a_request_that_is(why: str, plugin: FakePlugin) -> None:
    rid = plugin.track(1, captured=why != "not captured")
    forward(plugin, [4, 5], [50, 51], 0, states(1, 2))
    other = "health-check" if why == "not ours" else rid
    req, cache = request_with(other, [50, 51], [52], [4, 5], finished=why != "retracted")
    req.kv.holds_kv = why != "released before"
    capture.released(plugin, req, cache)
    assert len(plugin.in_ring()) == 0
    assert plugin.rows_invalid == 0


def test_short_of_room_the_first_rows_stay_behind_and_are_counted(
    plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    rid = plugin.track(1)
    forward(plugin, [4, 5, 6], [50, 51, 52], 0, states(1, 2, 3))
    monkeypatch.setattr(SlotRows, "room", lambda _: 2)
    capture.released(plugin, *request_with(rid, [50, 51, 52], [53], [4, 5, 6]))
    rows = plugin.in_ring()
    assert rows["position"].tolist() == [1, 2]
    assert values_of(rows["hidden"]) == [2, 3]
    assert plugin.slot_rows is not None
    assert plugin.slot_rows.rows_dropped == 1


class Copy:
    """A CUDA event."""

    ended = False

    def query(self) -> bool:
        return self.ended


def test_rows_leave_when_their_copy_has_ended_in_the_order_of_the_requests(
    plugin: FakePlugin,
) -> None:
    stored = plugin.slot_rows
    assert stored is not None
    copies = Copy(), Copy()
    for number, copied in enumerate(copies):
        stored.put(ints(number), ints(50), ints(0), 0, states(number))
        token, position, version = ints(50).int(), ints(0).int(), ints(0)
        ids = np.array([50], dtype=np.int32)
        gathered = Gathered(states(number), (token, position), version, ids, 0, copied)
        stored.leaving.append((number, gathered))
    copies[1].ended = True
    capture.drain(plugin)
    assert len(plugin.in_ring()) == 0
    assert 0 in {request for request, _ in plugin.slot_rows.leaving}
    copies[0].ended = True
    capture.drain(plugin)
    assert plugin.in_ring()["request_id"].tolist() == [0, 1]
    assert 0 not in {request for request, _ in plugin.slot_rows.leaving}
