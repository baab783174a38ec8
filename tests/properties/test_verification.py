"""Verification emits exactly the tokens of decoding without drafts, for any drafts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models import sampling
from paceline.models.sampling import DrawParams, draw
from paceline.services.rollout_gateway.engines.embedded.verify import (
    Nodes,
    accepted_drafts,
    verify,
)
from paceline.services.rollout_gateway.engines.requests.draws import follow

VOCAB = 5


def next_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    """A toy target: logits [V] as a function of the whole context."""
    generator = torch.Generator().manual_seed(hash(tokens) & 0xFFFF)
    return torch.randn(VOCAB, generator=generator) * 2


def plain(prompt: tuple[int, ...], seed: int, temperature: float, count: int) -> list[int]:
    """Decoding one token at a time."""
    tokens = prompt
    params = DrawParams.of([seed], [temperature])
    for _ in range(count):
        position = torch.tensor([len(tokens)])
        tokens += (int(draw(next_logits(tokens)[None], position, params).tokens[0]),)
    return list(tokens[len(prompt) :])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple),
    drafts=st.lists(
        st.lists(st.integers(-1, VOCAB - 1), min_size=3, max_size=3), min_size=1, max_size=5
    ),
    hints=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_any_drafts_give_the_tokens_of_plain_decoding(
    seed: int,
    temperature: float,
    prompt: tuple[int, ...],
    drafts: list[list[int]],
    hints: list[bool],
) -> None:
    wanted = 4 * len(drafts)
    expected = plain(prompt, seed, temperature, wanted)
    said: list[int] = []
    for proposal, hint in zip(drafts, hints, strict=False):
        # A true prefix of the answer is drafted half of the time, so that long acceptance is tried
        # too.
        chain = (
            expected[len(said) : len(said) + 3] if hint and len(said) + 3 <= wanted else proposal
        )
        context = (*prompt, *said)
        nodes = [
            next_logits((*context, *(max(token, 0) for token in chain[:depth])))
            for depth in range(4)
        ]
        positions = torch.arange(len(context), len(context) + 4)[None]
        params = DrawParams.of([seed] * 4, [temperature] * 4)
        verdict = verify(
            torch.stack(nodes), Nodes(torch.tensor([[context[-1], *chain]])), positions, params
        )
        taken = int(verdict.accepted[0]) + 1
        said += verdict.tokens[0, :taken].tolist()
        if chain == expected[len(said) - taken : len(said) - taken + 3]:
            assert taken == 4
    assert said[:wanted] == expected[: len(said)]


@st.composite
def draft_trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(tokens, parents) of up to 9 drafts; siblings differ, -1 is absent and has no children."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(1, 9))):
        parent = draw(
            st.sampled_from([0, *(i + 1 for i, token in enumerate(tokens) if token >= 0)])
        )
        siblings = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        free = sorted(set(range(VOCAB)) - siblings)
        tokens.append(draw(st.sampled_from([*free, -1])))
        parents.append(parent if tokens[-1] >= 0 else 0)
    return tokens, parents


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    rounds=st.lists(draft_trees(), min_size=1, max_size=4),
    ragged=st.booleans(),
)
def test_any_trees_give_the_tokens_of_plain_decoding(
    seed: int, temperature: float, rounds: list[tuple[list[int], list[int]]], ragged: bool
) -> None:
    prompt = (1, 3)
    expected = plain(prompt, seed, temperature, 10 * len(rounds))
    said: list[int] = []
    for tokens, parents in rounds:
        context = (*prompt, *said)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], max(token, 0)))
        above = torch.tensor([[0, *parents]])
        ids = torch.tensor([[context[-1], *tokens]])
        kept = (ids.flatten() >= 0).nonzero()[:, 0] if ragged else None
        nodes = Nodes(ids, above, sampling.node_depths(above, above), kept)
        logits = torch.stack([next_logits((*context, *path)) for path in paths])
        positions = nodes.positions(torch.tensor([len(context)]))
        count = len(paths) if kept is None else len(kept)
        params = DrawParams.of([seed] * count, [temperature] * count)
        verdict = verify(logits if kept is None else logits[kept], nodes, positions, params)
        taken = int(verdict.accepted[0]) + 1
        new = verdict.tokens[0, :taken].tolist()
        # Nothing that a draft offered was missed: the longest drafted path equal to the answer was
        # followed.
        answer = expected[len(said) :]
        fits = [
            len(path)
            for path, token in zip(paths[1:], tokens, strict=True)
            if token >= 0 and list(path) == answer[: len(path)]
        ]
        assert taken == len(new) == max(fits, default=0) + 1
        said += new
    assert said == expected[: len(said)]


def test_a_path_ends_where_no_child_is_the_draw() -> None:
    # Root draws 5, held by node 2; node 2 draws 7, held by node 3 under node 1 only.
    drawn = torch.tensor([[5, 0, 7, 1]])
    path, accepted = follow(drawn, torch.tensor([[9, 4, 5, 7]]), torch.tensor([[0, 0, 0, 1]]))
    assert (path.tolist(), accepted.tolist()) == ([[0, 2, 0, 0]], [1])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=6))
def test_acceptance_is_the_length_of_the_common_prefix(pairs: list[tuple[int, int]]) -> None:
    drawn = torch.tensor([[x for x, _ in pairs] + [0]])
    drafts = torch.tensor([[d for _, d in pairs]])
    expected = next((i for i, (x, d) in enumerate(pairs) if x != d), len(pairs))
    assert int(accepted_drafts(drawn, drafts)[0]) == expected


def test_rows_without_drafts_emit_one_token() -> None:
    assert (
        accepted_drafts(
            torch.zeros(3, 1, dtype=torch.int64), torch.empty(3, 0, dtype=torch.int64)
        ).tolist()
        == [0] * 3
    )
