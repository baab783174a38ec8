"""The dynamic tree equals the result of a naive search over whole paths."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculators.base import Drafts, DraftShape
from paceline.speculators.net_drafter import Beam, grow_tree

VOCAB = 6
Path = tuple[int, ...]


def shares(row: int, path: Path, seed: int) -> list[float]:
    """A toy drafter: probabilities of the children of a path."""
    generator = torch.Generator().manual_seed(hash((row, path, seed)) & 0xFFFFFF)
    return torch.softmax(torch.randn(VOCAB, generator=generator) * 2, dim=0).tolist()


def grown(rows: int, seed: int, shape: DraftShape) -> tuple[Drafts, int]:
    """The tree, and the levels that were expanded."""
    beams: list[list[Path]] = [[()] for _ in range(rows)]
    expanded = 0

    def expand(beam: Beam) -> torch.Tensor:
        nonlocal beams, expanded
        expanded += 1
        assert beam.level == expanded
        beams = [
            [
                (*beams[row][int(source)], int(token))
                for source, token in zip(beam.sources[row], beam.tokens[row], strict=True)
            ]
            for row in range(rows)
        ]
        return torch.tensor(
            [[shares(row, path, seed) for path in beams[row]] for row in range(rows)]
        ).log()

    first = torch.tensor([shares(row, (), seed) for row in range(rows)]).log()
    return grow_tree(first, expand, shape), expanded


def naive(row: int, seed: int, shape: DraftShape) -> dict[Path, float]:
    """EAGLE-2's candidates by paths: the `topk` best of each level are expanded by `topk` children
    each.
    """
    beam: dict[Path, float] = {(): 1.0}
    seen: dict[Path, float] = {}
    for _ in range(shape.steps):
        children: dict[Path, float] = {}
        for path, score in beam.items():
            likeliest = sorted(enumerate(shares(row, path, seed)), key=lambda one: -one[1])[
                : shape.topk
            ]
            children |= {(*path, token): score * share for token, share in likeliest}
        seen |= children
        beam = dict(sorted(children.items(), key=lambda one: -one[1])[: shape.topk])
    return dict(sorted(seen.items(), key=lambda one: (-one[1], len(one[0])))[: shape.drafts])


def paths_of(drafts: Drafts, row: int) -> list[Path]:
    assert drafts.parents is not None
    paths: list[Path] = [()]
    for token, parent in zip(
        drafts.tokens[row].tolist(), drafts.parents[row].tolist(), strict=True
    ):
        assert parent < len(paths)
        paths.append((*paths[parent], token))
    return paths[1:]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    steps=st.integers(1, 5),
    topk=st.integers(2, 4),
    nodes=st.integers(1, 20),
)
def test_the_tree_is_the_one_a_search_over_paths_finds(
    seed: int, rows: int, steps: int, topk: int, nodes: int
) -> None:
    shape = DraftShape(steps, topk, min(nodes, topk + (steps - 1) * topk**2))
    drafts, _ = grown(rows, seed, shape)
    for row in range(rows):
        expected = naive(row, seed, shape)
        paths = paths_of(drafts, row)
        assert len(set(paths)) == len(paths) == len(expected)
        worst = min(expected.values())
        for path, score in zip(paths, drafts.scores[row].tolist(), strict=True):
            true = math.prod(
                shares(row, path[:depth], seed)[path[depth]] for depth in range(len(path))
            )
            assert abs(score - true) < 1e-4 * true + 1e-6
            # A path that the search did not keep may only tie with its worst one.
            assert path in expected or abs(true - worst) < 1e-3 * worst


def test_growing_stops_where_every_node_is_below_the_floor() -> None:
    _, levels = grown(2, 7, DraftShape(5, 2, 12))
    _, cut = grown(2, 7, DraftShape(5, 2, 12, floor=0.9))
    assert (levels, cut) == (4, 0)
