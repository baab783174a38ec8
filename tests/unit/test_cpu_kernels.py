"""The CPU substitute for sgl_kernel against plain float64 loops.

The substitute is imported by path, under its own name.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.local.patience import patient

FOLDER = Path(__file__).parents[1] / "sglang" / "cpu_kernels"
HEADS, KV_HEADS, SIZE, SCALING = 6, 2, 8, 0.3
NO_EXTRAS = (0.0, False, 0, None, None)


def load_kernels() -> ModuleType:
    name, folder = "cpu_kernels_under_test", FOLDER / "sgl_kernel"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernels = load_kernels()


class Cache:
    """A KV pool that scatters each request's slots; unused slots hold NaN."""

    def __init__(self, lens: Sequence[int], dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.lens = torch.tensor(lens)
        slots, width = 97, max(lens) + 5
        self.keys = torch.full((slots, KV_HEADS, SIZE), math.nan, dtype=dtype)
        self.values = self.keys.clone()
        self.table = torch.zeros((len(lens) + 3, width), dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 3)[: len(lens)]
        free = torch.randperm(slots - 1)[: sum(lens)] + 1
        for row, part in zip(self.rows, free.split(list(lens)), strict=True):
            self.table[row, : len(part)] = part.int()
            self.keys[part] = torch.randn(len(part), KV_HEADS, SIZE).to(dtype)
            self.values[part] = torch.randn(len(part), KV_HEADS, SIZE).to(dtype)

    def slots(self, request: int) -> list[int]:
        return self.table[self.rows[request], : int(self.lens[request])].tolist()


def loop_attention(query: Tensor, keys: Tensor, values: Tensor, seen: Sequence[int]) -> Tensor:
    """One query [H, D] over keys and values [L, N, D] at positions `seen`, head by head in
    float64.
    """
    rows = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = [float(query[head].double() @ keys[at, shared].double()) * SCALING for at in seen]
        weights = [math.exp(score - max(scores)) for score in scores]
        mixed = sum(w * values[at, shared].double() for w, at in zip(weights, seen, strict=True))
        rows.append(mixed / sum(weights))
    return torch.stack(rows)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_equals_a_loop_and_stores_the_new_token(
    dtype: torch.dtype,
) -> None:
    cache = Cache([9, 1, 4, 17], dtype)
    query, output = torch.randn(4, HEADS, SIZE).to(dtype), torch.empty(4, HEADS, SIZE, dtype=dtype)
    key, value = torch.randn(2, 4, KV_HEADS, SIZE).to(dtype)
    last = torch.tensor([cache.slots(r)[-1] for r in range(4)])
    kernels.decode_attention_cpu(
        query,
        cache.keys,
        cache.values,
        1.0,
        1.0,
        output,
        key,
        value,
        last,
        torch.empty(0),
        cache.table,
        cache.rows,
        cache.lens,
        SCALING,
        *NO_EXTRAS,
    )
    assert torch.equal(cache.keys[last], key)
    assert torch.equal(cache.values[last], value)
    for request in range(4):
        slots = cache.slots(request)
        expected = loop_attention(
            query[request], cache.keys[slots], cache.values[slots], range(len(slots))
        )
        torch.testing.assert_close(
            output[request].double(), expected, atol=tolerance(dtype), rtol=0
        )


def run_extend(
    cache: Cache,
    news: Sequence[int],
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    is_causal: bool = True,
) -> Tensor:
    output = torch.empty_like(query)
    lens = torch.tensor(news, dtype=torch.int32)
    key, value = new or (None, None)
    kernels.extend_attention_cpu(
        query,
        key,
        value,
        output,
        cache.keys,
        cache.values,
        1.0,
        1.0,
        cache.table,
        cache.rows,
        cache.lens,
        lens,
        (lens.cumsum(0) - lens).int(),
        max(news),
        SCALING,
        *NO_EXTRAS,
        mask,
        is_causal,
    )
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_attention_is_causal_over_prefix_and_new_tokens(
    dtype: torch.dtype,
) -> None:
    totals, news = [7, 5, 12, 1], [7, 2, 1, 1]
    cache = Cache(totals, dtype)
    query = torch.randn(sum(news), HEADS, SIZE).to(dtype)
    output = run_extend(cache, news, query, None, None)
    row = 0
    for request, (total, new) in enumerate(zip(totals, news, strict=True)):
        keys, values = cache.keys[cache.slots(request)], cache.values[cache.slots(request)]
        for offset in range(new):
            expected = loop_attention(query[row], keys, values, range(total - new + offset + 1))
            torch.testing.assert_close(
                output[row].double(), expected, atol=tolerance(dtype), rtol=0
            )
            row += 1


def test_extend_attention_takes_new_keys_from_its_arguments_where_given() -> None:
    cache = Cache([6, 4], torch.float32)
    news = [2, 3]
    query, key, value = (torch.randn(5, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    output = run_extend(cache, news, query, (key, value), None)
    keys = torch.cat([cache.keys[cache.slots(0)][:4], key[:2]])
    values = torch.cat([cache.values[cache.slots(0)][:4], value[:2]])
    torch.testing.assert_close(
        output[1].double(), loop_attention(query[1], keys, values, range(6)), atol=1e-5, rtol=0
    )


def test_extend_attention_without_causality_sees_every_key() -> None:
    cache = Cache([5], torch.float32)
    query = torch.randn(3, HEADS, SIZE)
    output = run_extend(cache, [3], query, None, None, is_causal=False)
    keys, values = cache.keys[cache.slots(0)], cache.values[cache.slots(0)]
    torch.testing.assert_close(
        output[0].double(), loop_attention(query[0], keys, values, range(5)), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("form", ["query x query", "query x all"])
def test_extend_attention_follows_the_tree_mask_in_both_forms(
    form: str,
) -> None:
    totals, nodes = [9, 6, 30], 4
    trees = [
        [[0], [0, 1], [0, 2], [0, 2, 3]],
        [[0], [0, 1], [0, 1, 2], [0, 3]],
        [[0], [0, 1], [0, 2], [0, 3]],
    ]
    squares = torch.zeros(3, nodes, nodes, dtype=torch.bool)
    for request, tree in enumerate(trees):
        for node, ancestors in enumerate(tree):
            squares[request, node, ancestors] = True
    parts = [
        square
        if form == "query x query"
        else torch.cat([torch.ones(nodes, total - nodes, dtype=torch.bool), square], 1)
        for square, total in zip(squares, totals, strict=True)
    ]
    cache = Cache(totals, torch.float32)
    query = torch.randn(3 * nodes, HEADS, SIZE)
    output = run_extend(
        cache, [nodes] * 3, query, None, torch.cat([part.flatten() for part in parts])
    )
    for request, (total, tree) in enumerate(zip(totals, trees, strict=True)):
        keys, values = cache.keys[cache.slots(request)], cache.values[cache.slots(request)]
        for node, ancestors in enumerate(tree):
            seen = [*range(total - nodes), *(total - nodes + ancestor for ancestor in ancestors)]
            expected = loop_attention(query[request * nodes + node], keys, values, seen)
            torch.testing.assert_close(
                output[request * nodes + node].double(), expected, atol=1e-5, rtol=0
            )


def test_a_tree_mask_of_neither_form_is_refused() -> None:
    with pytest.raises(InvalidInput, match="fits neither form"):
        run_extend(
            Cache([9], torch.float32),
            [4],
            torch.randn(4, HEADS, SIZE),
            None,
            torch.ones(17, dtype=torch.bool),
        )


@pytest.mark.parametrize(
    ("extras", "named"),
    [
        ((30.0, False, 0, None, None), "logit cap"),
        ((0.0, True, 0, None, None), "cross attention"),
        ((0.0, False, 128, None, None), "sliding window"),
        ((0.0, False, 0, None, torch.zeros(HEADS)), "attention sinks"),
    ],
)
def test_attention_that_is_not_covered_is_refused_by_name(
    extras: tuple[object, ...], named: str
) -> None:
    cache = Cache([3], torch.float32)
    query = torch.randn(1, HEADS, SIZE)
    with pytest.raises(InvalidInput, match=named):
        kernels.decode_attention_cpu(
            query,
            cache.keys,
            cache.values,
            1.0,
            1.0,
            query,
            None,
            None,
            cache.rows,
            query,
            cache.table,
            cache.rows,
            cache.lens,
            SCALING,
            *extras,
        )


# A tree of topk 2 and 3 steps. Candidates are numbered as the drafter scored them: 0, 1 children of
# the root; then four per level (two per expanded node). parent_list[g] is the candidate
# with the children 2g and 2g + 1.
PARENT_LIST = torch.tensor([[-1, 0, 1, 3, 4], [-1, 0, 1, 2, 3]])
SELECTED = torch.tensor([[0, 1, 3, 4, 6], [0, 2, 3, 4, 7]])
# Request 0: nodes 1, 2 under the root; candidate 3 (node 3) under 0; 4 (node 4) under 1; 6 (node 5)
# under 3. Request 1: node 1 under the root; 2, 3 (nodes 2, 3) under 0; 4 has the parent 1, which
# was not chosen; 7 under 2.
PATHS = [
    [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]],
    [[0], [0, 1], [0, 1, 2], [0, 1, 3], None, None],
]


def build_tree(
    parent_list: Tensor, selected: Tensor, lens: Tensor, topk: int, depth: int, mode: int
) -> list[Tensor]:
    batch, nodes = len(lens), selected.shape[1] + 1
    columns = int(lens.sum()) + batch * nodes if mode == 0 else batch * nodes
    mask, positions = (
        torch.ones(nodes * columns, dtype=torch.bool),
        torch.empty(batch * nodes, dtype=torch.long),
    )
    links = list(torch.full((3, batch, nodes), -1))
    kernels.build_tree_kernel_efficient_cpu(
        parent_list, selected, lens, mask, positions, *links, topk, depth, nodes, mode
    )
    return [mask, positions, *links]


@pytest.mark.parametrize("mode", [0, 1])
def test_a_tree_is_built_as_drawn_by_hand(mode: int) -> None:
    lens = torch.tensor([7, 3])
    mask, positions, index, child, sibling = build_tree(PARENT_LIST, SELECTED, lens, 2, 3, mode)
    assert index.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert child[0].tolist() == [1, 3, 4, 5, -1, -1]
    assert sibling[0].tolist() == [-1, 2, -1, -1, -1, -1]
    assert child[1, :2].tolist() == [1, 2]
    assert sibling[1, :3].tolist() == [-1, -1, 3]
    start = 0
    for request, length in enumerate(lens.tolist()):
        width = 6 + (length if mode == 0 else 0)
        block = mask[start : start + 6 * width].view(6, width)
        start += 6 * width
        assert block[:, : width - 6].all()
        for node, path in enumerate(PATHS[request]):
            if path is not None:
                assert block[node, width - 6 :].nonzero().flatten().tolist() == path
                assert positions[request * 6 + node] == length + len(path) - 1


def test_a_chain_and_a_lone_root_are_trees_too() -> None:
    lens = torch.tensor([4])
    mask, positions, _, child, sibling = build_tree(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), lens, 1, 3, 1
    )
    assert torch.equal(mask.view(4, 4), torch.ones(4, 4).tril().bool())
    assert positions.tolist() == [4, 5, 6, 7]
    assert (child.tolist(), sibling.tolist()) == ([[1, 2, 3, -1]], [[-1] * 4])
    mask, positions, index, child, sibling = build_tree(
        torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, dtype=torch.long), lens, 2, 1, 1
    )
    assert (mask.tolist(), positions.tolist()) == ([True], [4])
    assert (index.tolist(), child.tolist(), sibling.tolist()) == ([[0]], [[-1]], [[-1]])


def test_a_one_step_tree_has_no_parent_list() -> None:
    empty = torch.empty(1, 0, dtype=torch.long)
    _, positions, _, child, sibling = build_tree(
        empty, torch.tensor([[0, 1, 2]]), torch.tensor([4]), 3, 1, 1
    )
    assert positions.tolist() == [4, 5, 5, 5]
    assert (child.tolist(), sibling.tolist()) == ([[1, -1, -1, -1]], [[-1, 2, 3, -1]])


def test_a_bit_packed_mask_is_refused() -> None:
    with pytest.raises(InvalidInput, match="tree mask mode"):
        build_tree(PARENT_LIST, SELECTED, torch.tensor([7, 3]), 2, 3, 2)


def verify(
    candidates: list[list[int]], chosen: list[list[int]], links: list[Tensor], longest: int
) -> list[list[int]]:
    batch, nodes = len(candidates), len(candidates[0])
    predicts = torch.zeros(batch * nodes, dtype=torch.int32)
    accept_index = torch.full((batch, longest), -1, dtype=torch.int32)
    count = torch.empty(batch, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=count,
        candidates=torch.tensor(candidates),
        retrive_index=links[0],
        retrive_next_token=links[1],
        retrive_next_sibling=links[2],
        target_predict=torch.tensor(chosen),
    )
    return [predicts.tolist(), *accept_index.tolist(), count.tolist()]


def test_greedy_verification_follows_the_targets_choice_through_the_tree() -> None:
    links = build_tree(
        PARENT_LIST[:1].repeat(2, 1), SELECTED[:1].repeat(2, 1), torch.tensor([7, 3]), 2, 3, 1
    )[2:]
    candidates = [[10, 11, 12, 13, 14, 15]] * 2
    # Request 0 takes the second child (12), then its only child (14), then wants a token that no
    # child holds. Request 1 wants 99 at the root: nothing is accepted; its first nodes' choices
    # count for nothing.
    chosen = [[12, 0, 14, 0, 55, 0], [99, 13, 14, 15, 0, 0]]
    predicts, first, second, count = verify(candidates, chosen, links, 4)
    assert first == [0, 2, 4, -1]
    assert second == [6, -1, -1, -1]
    assert count == [2, 0]
    assert predicts == [12, 0, 14, 0, 55, 0, 99, 0, 0, 0, 0, 0]


def test_greedy_verification_stops_at_the_longest_path_asked_for() -> None:
    links = build_tree(PARENT_LIST[:1], SELECTED[:1], torch.tensor([7]), 2, 3, 1)[2:]
    predicts, path, count = verify([[10, 11, 12, 13, 14, 15]], [[11, 13, 0, 15, 0, 77]], links, 3)
    assert (path, count) == ([0, 1, 3], [2])
    assert predicts == [11, 13, 0, 15, 0, 0]


def test_links_from_an_ancestor_mask_equal_those_of_the_tree() -> None:
    lens = torch.tensor([7, 3])
    mask, positions, *links = build_tree(
        PARENT_LIST[:1].repeat(2, 1), SELECTED[:1].repeat(2, 1), lens, 2, 3, 1
    )
    again = [torch.empty_like(positions), *(torch.full_like(link, 77) for link in links)]
    kernels.speculative.reconstruct_indices_from_tree_mask(mask, lens, *again, 2, 6)
    for seen, expected in zip(again, [positions, *links], strict=True):
        assert torch.equal(seen, expected)


def test_nodes_without_ancestors_are_roots_without_siblings() -> None:
    positions, index, child, sibling = torch.empty(3).long(), *torch.empty(3, 1, 3).long()
    mask = torch.eye(3, dtype=torch.bool).flatten()
    kernels.speculative.reconstruct_indices_from_tree_mask(
        mask, torch.tensor([5]), positions, index, child, sibling, 1, 3
    )
    assert (positions.tolist(), child.tolist(), sibling.tolist()) == (
        [5, 5, 5],
        [[-1] * 3],
        [[-1] * 3],
    )


def test_draft_branches_see_the_prefix_and_their_own_slots() -> None:
    table = torch.arange(60, dtype=torch.int32).view(3, 20) + 100
    lens, rows, topk, steps = torch.tensor([5, 2]), torch.tensor([2, 0]), 3, 2
    draft = kernels.build_draft_decode_metadata_cpu(table, rows, lens, topk, steps, 20)
    written = torch.empty(2 * topk * steps, dtype=torch.long)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lens, written, 20, topk, steps)
    for request, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        for branch in range(topk):
            own = [100 + row * 20 + length + branch * steps + step for step in range(steps)]
            assert written.view(2, topk, steps)[request, branch].tolist() == own
            prefix = [100 + row * 20 + at for at in range(length)]
            assert draft[request * topk + branch, : length + steps].tolist() == prefix + own


def test_slot_ranges_are_written_and_read_back() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    rows, start, end = torch.tensor([3, 1]), torch.tensor([2, 0]), torch.tensor([5, 2])
    kernels.assign_req_to_token_pool_cpu(
        rows, table, start, end, torch.tensor([11, 12, 13, 21, 22]), 10
    )
    assert table[3].tolist() == [0, 0, 11, 12, 13, 0, 0, 0, 0, 0]
    assert table[1].tolist() == [21, 22, 0, 0, 0, 0, 0, 0, 0, 0]
    read = torch.zeros(7, dtype=torch.long)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, read, 10)
    assert read.tolist() == [11, 12, 13, 21, 22, 0, 0]


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_the_bonus_token_is_the_last_accepted_one(shape: tuple[int, ...]) -> None:
    bonus = torch.zeros(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(
        (torch.arange(12) + 50).view(shape), torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4
    )
    assert bonus.tolist() == [50, 57, 59]


def test_accepted_slots_move_together_at_the_front() -> None:
    accept = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    accepted = torch.zeros(9, dtype=torch.long)
    kernels.fill_accept_out_cache_loc_cpu(accept, torch.arange(9) + 40, accepted)
    assert accepted.tolist() == [40, 42, 43, 46, 47, 48, 0, 0, 0]


def test_kv_rows_move_as_if_all_were_read_first() -> None:
    buffers = [torch.randn(12, 2, 4), torch.randn(12, 3, 4).bfloat16()]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers])
    target, source = torch.tensor([3, 4, 5, 0, 0]), torch.tensor([4, 5, 11, 0, 0])
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for buffer, old in zip(buffers, before, strict=True):
        for slot in range(12):
            assert torch.equal(buffer[slot], old[{3: 4, 4: 5, 5: 11}.get(slot, slot)])


@pytest.mark.parametrize("select", [None, torch.tensor([1, 4])])
def test_input_ids_shift_left_and_end_in_the_new_token(select: Tensor | None) -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    kernels.rotate_input_ids_cpu(
        ids, torch.tensor([0, 4]), torch.tensor([4, 2]), torch.tensor([[90], [91]]), select
    )
    assert ids.tolist() == ([2, 3, 4, 90, 6, 91] if select is None else [2, 90, 4, 4, 91, 6])


def test_sglang_finds_the_attentions_and_no_amx_kernels() -> None:
    assert torch.ops.sgl_kernel.decode_attention_cpu is kernels.decode_attention_cpu
    assert torch.ops.sgl_kernel.extend_attention_cpu is kernels.extend_attention_cpu
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_a_process_with_the_folder_on_its_path_starts_without_torch_and_runs_the_hidden_sitecustomize(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.hidden_ran = True\n")
    code = (
        "import sys; print(sys.hidden_ran, 'torch' in sys.modules, "
        "'torchvision._meta_registrations' in sys.modules)"
    )
    path = os.pathsep.join([str(FOLDER), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=patient(30),
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stderr
