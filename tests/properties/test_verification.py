"""Verification emits exactly what decoding without drafts emits, whatever is drafted."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.sampling import DrawParams, draw
from rollout_gateway.engines.embedded.verify import accepted_drafts, verify

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
    drafts=st.lists(st.lists(st.integers(-1, VOCAB - 1), min_size=3, max_size=3), min_size=1, max_size=5),
    hints=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_any_drafts_give_the_tokens_of_plain_decoding(
    seed: int, temperature: float, prompt: tuple[int, ...], drafts: list[list[int]], hints: list[bool]
) -> None:
    wanted = 4 * len(drafts)
    expected = plain(prompt, seed, temperature, wanted)
    said: list[int] = []
    for proposal, hint in zip(drafts, hints, strict=False):
        # A true prefix of the answer is drafted half of the time, so that long acceptance is tried too.
        chain = expected[len(said) : len(said) + 3] if hint and len(said) + 3 <= wanted else proposal
        context = (*prompt, *said)
        nodes = [next_logits((*context, *(max(token, 0) for token in chain[:depth]))) for depth in range(4)]
        positions = torch.arange(len(context), len(context) + 4)[None]
        params = DrawParams.of([seed] * 4, [temperature] * 4)
        verdict = verify(torch.stack(nodes)[None], torch.tensor([chain]), positions, params)
        taken = int(verdict.accepted[0]) + 1
        said += verdict.tokens[0, :taken].tolist()
        if chain == expected[len(said) - taken : len(said) - taken + 3]:
            assert taken == 4
    assert said[:wanted] == expected[: len(said)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=6))
def test_acceptance_is_the_length_of_the_common_prefix(pairs: list[tuple[int, int]]) -> None:
    drawn = torch.tensor([[x for x, _ in pairs] + [0]])
    drafts = torch.tensor([[d for _, d in pairs]])
    expected = next((i for i, (x, d) in enumerate(pairs) if x != d), len(pairs))
    assert int(accepted_drafts(drawn, drafts)[0]) == expected


def test_rows_without_drafts_emit_one_token() -> None:
    assert (
        accepted_drafts(torch.zeros(3, 1, dtype=torch.int64), torch.empty(3, 0, dtype=torch.int64)).tolist() == [0] * 3
    )
