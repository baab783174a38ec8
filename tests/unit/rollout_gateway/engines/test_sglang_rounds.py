"""Hooks on SGLang's workers and results, with substitutes for its objects: they switch, restore and
count.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.services.rollout_gateway.bandits.base import BanditSettings
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.plugin import rounds
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import ArmChooser, Tracked
from paceline.services.rollout_gateway.engines.sglang.plugin.runtimes import Runtimes, read_slots
from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import Unread
from paceline.trajectory import SpeculationStats, VersionSet

NAMES = ("off", "eagle:3_1_4", "eagle:3_2_8")


class Mode:
    """SGLang's ForwardMode, as far as the hooks use it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def is_decode(self) -> bool:
        return self._name == "decode"

    def is_idle(self) -> bool:
        return self._name == "idle"


def make_plugin(names: tuple[str, ...] = NAMES, requests: dict[str, Tracked] | None = None) -> Any:
    known = requests or {}
    return SimpleNamespace(
        arms=ArmChooser(names, BanditSettings(kind="epsilon_greedy", epsilon=0.0), seed=1),
        tp_group=None,
        rank=0,
        versions=VersionSet(),
        arm="off",
        requests=known,
        slot_rows=None,
        unread=Unread(),
    )


def make_request(forced_arm: str = "") -> Tracked:
    request = Request(1, (1, 2, 3), Sampling(seed=1, max_tokens=99), forced_arm=forced_arm)
    return Tracked(RunningSequence(request, frozenset(), token_limit=99, length=3), 0)


def make_worker(plugin: Any) -> Any:
    """A worker with its topk as the only switched attribute."""
    maximum = plugin.arms.maximum
    worker = SimpleNamespace(device="cpu", topk=maximum.topk, draft_token_num=maximum.draft_tokens)
    slots = ((worker, "topk"), (worker, "draft_token_num"))
    shapes = {name: arm.shape for name, arm in plugin.arms.arms.items()}
    sets = {name: (shape.topk, shape.draft_tokens) for name, shape in shapes.items()}
    setattr(worker, rounds.RUNTIMES, Runtimes(slots, read_slots(slots), sets))
    return worker


def make_batch(mode: str = "decode", rows: int = 2, topk: int = 2) -> Any:
    proposals = torch.arange(rows * topk, dtype=torch.float32).view(rows, topk)
    return SimpleNamespace(
        forward_mode=Mode(mode),
        is_extend_in_batch=False,
        reqs=[make_row(str(row)) for row in range(rows)],
        spec_info=SimpleNamespace(topk_p=proposals, topk_index=proposals.long()),
    )


def make_row(
    rid: str, output: int = 0, finished_len: int | None = None, finished: bool = False
) -> Any:
    return SimpleNamespace(
        rid=rid,
        output_ids=[0] * output,
        finished_len=finished_len,
        finished=lambda: finished,
        is_retracted=False,
    )


# ---- a round


@pytest.mark.parametrize(("arm", "width"), [("off", 2), ("eagle:3_1_4", 1), ("eagle:3_2_8", 2)])
def test_a_decode_round_runs_with_its_arm_and_leaves_the_launch_shape(arm: str, width: int) -> None:
    plugin = make_plugin()
    plugin.arms.force(arm)
    worker, batch, seen = make_worker(plugin), make_batch(), {}

    def original(worker: Any, batch: Any, on_publish: Any = None) -> Any:
        seen.update(
            arm=plugin.arm,
            topk=worker.topk,
            proposals=batch.spec_info.topk_p,
            ids=batch.spec_info.topk_index,
        )
        return SimpleNamespace()

    result = rounds.eagle_round(plugin, original, worker, batch)
    assert seen["topk"] == plugin.arms.arms[arm].shape.topk
    assert torch.equal(seen["proposals"], torch.arange(4.0).view(2, 2)[:, :width])
    assert torch.equal(seen["ids"], torch.arange(4).view(2, 2)[:, :width])
    assert (seen["arm"], plugin.arm) == (arm, "off")
    assert worker.topk == 2
    assert getattr(result, rounds.ROUND).plan.arm.name == arm


def test_prefill_runs_with_the_launch_shape_and_chooses_nothing() -> None:
    plugin = make_plugin()
    worker = make_worker(plugin)
    topk = rounds.eagle_round(
        plugin, lambda worker, batch: worker.topk, worker, make_batch("extend")
    )
    assert topk == 2


def test_a_round_that_fails_leaves_the_launch_shape() -> None:
    plugin = make_plugin()
    plugin.arms.force("off")
    worker = make_worker(plugin)

    def fails(worker: Any, batch: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        rounds.eagle_round(plugin, fails, worker, make_batch())
    assert worker.topk == 2


def test_what_a_round_leaves_for_the_next_has_the_launch_width() -> None:
    plugin, drafter, seen = make_plugin(), SimpleNamespace(topk=1), []
    plugin.slot_rows, plugin.arm = object(), "eagle:3_1_4"
    rounds.eagle_catch_up(
        plugin, lambda drafter, batch, result: seen.append(drafter.topk), drafter, None, None
    )
    assert (seen, drafter.topk) == ([2], 1)


def test_a_round_that_is_off_calls_no_drafter_where_its_states_are_kept() -> None:
    plugin, batch = make_plugin(), make_batch()
    plugin.arms.force("off")
    plugin.slot_rows = object()
    batch.spec_info.hidden_states = torch.ones(2, 3)
    left = SimpleNamespace()

    def original(worker: Any, batch: Any) -> Any:
        result = SimpleNamespace(next_draft_input=left)
        rounds.eagle_catch_up(plugin, pytest.fail, SimpleNamespace(topk=1), batch, result)
        return result

    rounds.eagle_round(plugin, original, make_worker(plugin), batch)
    assert torch.equal(left.topk_p, torch.arange(4.0).view(2, 2))  # of the launch's width
    assert torch.equal(left.hidden_states, torch.ones(2, 3))
    assert not plugin.unread.caught_up(batch.reqs)
    assert plugin.unread.caught_up(batch.reqs)


def test_a_round_that_is_off_reads_at_once_where_no_states_are_kept() -> None:
    plugin, seen = make_plugin(), []
    rounds.eagle_catch_up(
        plugin, lambda drafter, *_: seen.append(drafter.topk), SimpleNamespace(topk=1), None, None
    )
    assert seen == [2]


# ---- n-gram trees


def test_ngram_trees_are_looked_up_at_launch_size_and_cut_to_the_round() -> None:
    plugin = make_plugin(("off", "ngram:1_1_2", "ngram:3_1_4"))
    worker = SimpleNamespace(draft_token_num=2)

    def original(worker: Any, batch: Any) -> Any:
        assert worker.draft_token_num == 4
        return np.arange(8), np.ones(32, dtype=bool)

    drafts, mask = rounds.ngram_drafts(plugin, original, worker, None)
    assert (drafts.tolist(), mask.shape, worker.draft_token_num) == ([0, 1, 4, 5], (8,), 2)


def test_what_an_ngram_round_leaves_for_the_next_has_the_launch_width() -> None:
    plugin = make_plugin(("off", "ngram:1_1_2", "ngram:3_1_4"))
    plugin.arms.force("ngram:1_1_2")
    worker = make_worker(plugin)

    def original(worker: Any, batch: Any) -> Any:
        assert worker.draft_token_num == 2
        left = SimpleNamespace(
            accept_tokens=torch.tensor([7, 8, 9, 10]), draft_token_num=2, num_tokens_per_req=2
        )
        return SimpleNamespace(next_draft_input=left)

    left = rounds.ngram_round(plugin, original, worker, make_batch()).next_draft_input
    assert left.accept_tokens.tolist() == [7, 8, 0, 0, 9, 10, 0, 0]
    assert (left.draft_token_num, left.num_tokens_per_req, worker.draft_token_num) == (4, 4, 4)


def test_the_corpus_reads_rows_of_launch_width() -> None:
    plugin = make_plugin(("off", "ngram:3_1_4"))
    worker, seen = SimpleNamespace(draft_token_num=1), []
    rounds.ngram_learn(
        plugin, lambda worker, batch: seen.append(worker.draft_token_num), worker, None
    )
    assert (seen, worker.draft_token_num) == ([4], 1)


# ---- contents of a result


def done_round(plugin: Any, arm: str) -> Any:
    """The result of a decode round with the arm forced."""
    plugin.arms.force(arm)
    return rounds.eagle_round(
        plugin, lambda worker, batch: SimpleNamespace(), make_worker(plugin), make_batch()
    )


def test_the_bandit_is_told_of_the_tokens_of_rows_that_still_run() -> None:
    plugin, told = make_plugin(), []
    plugin.arms.observe = lambda plan, taken, seconds: told.append(
        (plan.arm.name, taken, seconds > 0)
    )
    result = done_round(plugin, "eagle:3_1_4")
    batch = SimpleNamespace(reqs=[make_row("0"), make_row("1", finished=True), make_row("2")])
    tokens = [[1, 2, 3], [4, 5], [6]]
    answer = rounds.tokens_resolved(
        plugin, lambda processor, result, batch: tokens, None, result, batch
    )
    assert answer is tokens
    assert told == [("eagle:3_1_4", [3, 0, 1], True)]


@pytest.mark.parametrize(
    ("arm", "accepted", "row", "stats"),
    [
        (
            "eagle:3_2_8",
            3,
            make_row("0", output=9),
            SpeculationStats(
                *(1, 7, 2, 3, 1, (1, 1, 1), (1, 1, 0), 1, 3),
                arm_drafted_rounds={"eagle:3_2_8": 1},
                arm_round_tokens={"eagle:3_2_8": 3},
            ),
        ),
        (
            "eagle:3_2_8",
            3,
            make_row("0", output=9, finished_len=8),
            SpeculationStats(
                *(1, 7, 1, 2, 1, (1, 1, 1), (1, 0, 0), 1, 2),
                arm_drafted_rounds={"eagle:3_2_8": 1},
                arm_round_tokens={"eagle:3_2_8": 2},
            ),
        ),
        ("off", 1, make_row("0", output=9), SpeculationStats(1, 0, 0, 0, 0)),
    ],
)
def test_a_round_is_counted_for_its_request_up_to_its_end(
    arm: str, accepted: int, row: Any, stats: SpeculationStats
) -> None:
    tracked = make_request()
    plugin = make_plugin(requests={"0": tracked})
    result = done_round(plugin, arm)
    result.accept_lens = torch.tensor([accepted])
    rounds.row_advanced(plugin, lambda *_: None, None, row, None, result, 0, None)
    assert tracked.sequence.speculation == stats


def test_a_round_without_speculation_is_a_target_step() -> None:
    tracked = make_request()
    plugin = make_plugin(requests={"0": tracked})
    result = SimpleNamespace(accept_lens=None)
    rounds.row_advanced(
        plugin, lambda *_: None, None, make_row("0", output=1), None, result, 0, None
    )
    assert tracked.sequence.speculation == SpeculationStats(target_steps=1)


def test_requests_that_are_not_ours_are_left_alone() -> None:
    called = []
    rounds.row_advanced(
        make_plugin(), lambda *row: called.append(row), None, make_row("x"), None, None, 0, None
    )
    assert len(called) == 1
