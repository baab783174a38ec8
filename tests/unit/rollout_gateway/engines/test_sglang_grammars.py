"""Masks over the trees that SGLang verifies: by tokens drawn ahead, where a draw counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from paceline.errors import InvalidInput
from paceline.models.config import read_config
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.services.rollout_gateway.engines.requests.structures import GrammarFault
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import Drawn, Tracked
from paceline.services.rollout_gateway.engines.sglang.plugin.sampling import TreeGrammars, asks

POLICY = Path(__file__).parents[4] / "examples" / "demo" / "policy_start"
CODEC = TextCodec(POLICY)
A, B, C, ONE = (CODEC.encode_piece(letter)[0] for letter in "abc1")
EOS, VOCAB = 1, 320
PROMPT = (5, 6, 7)
ORIGIN = DrawnBy(0, "off", "float32")


@pytest.fixture(scope="module")
def grammars() -> Iterator[TreeGrammars]:
    grammars = TreeGrammars(read_config(POLICY), POLICY, 0, None)
    yield grammars
    grammars.close()


def tracked(said: Sequence[int] = (), ahead: Sequence[int] = (), **sampling: Any) -> Tracked:
    """A request with the response `said`; `ahead` was drawn behind it."""
    settings = {"seed": 1, "max_tokens": 50, "regex": "(ab|ac|b)[0-9]{2}", **sampling}
    request = Request(1, PROMPT, Sampling(**settings))
    one = Tracked(RunningSequence(request, frozenset({EOS}), 50, tokens=list(said)), 0)
    for index, token in enumerate(ahead, len(said)):
        one.draws[index] = Drawn(token, -1.0, 1.0, ORIGIN)
    return one


def masked(
    grammars: TreeGrammars,
    rows: Sequence[Tracked | None],
    firsts: Sequence[int],
    token_ids: torch.Tensor,
    parents: torch.Tensor | None = None,
) -> list[list[set[str] | None]]:
    """Return the texts that may follow, by row and node; None where no mask applies."""
    logits = torch.zeros(token_ids.numel(), VOCAB)
    grammars.mask_draws_(rows, logits, firsts, token_ids, parents)
    found: list[set[str] | None] = [
        None
        if bool((row == 0).all())
        else {CODEC.token_text(int(token)) for token in torch.nonzero(row == 0)[:, 0]}
        for row in logits
    ]
    width = token_ids.shape[1]
    return [found[start : start + width] for start in range(0, len(found), width)]


def at(one: Tracked) -> int:
    """Absolute position of the next draw."""
    return len(PROMPT) + len(one.sequence.tokens) + len(one.draws)


def test_each_node_is_masked_behind_its_own_path_and_others_stay(grammars: TreeGrammars) -> None:
    free = Tracked(RunningSequence(Request(2, PROMPT, Sampling(1, 5)), frozenset(), 5), 0)
    one = tracked([A])
    # root -> b -> 1, root -> c; a draft that may not be, and one in no list of children
    tokens = torch.tensor([[9, B, C, ONE, A, B], [9, B, C, ONE, A, B], [9] * 6])
    parents = torch.tensor([[-1, 0, 0, 1, 0, -1]] * 3)
    assert asks(one)
    assert not asks(free)
    assert not asks(None)
    rows = masked(grammars, [free, one, None], [at(free), at(one), 0], tokens, parents)
    assert rows[0] == rows[2] == [None] * 6
    digits = set("0123456789")
    root, b, c, b_one, wrong, orphan = rows[1]
    assert root == {"b", "c"}
    assert b is not None
    assert b == c == b_one
    assert digits <= b
    assert wrong is None
    assert orphan is None
    assert tokens[1].tolist() == [9, B, C, ONE, A, B]


def test_what_a_device_drew_ahead_counts(grammars: TreeGrammars) -> None:
    roots = torch.tensor([[9], [9], [9]])
    rows = [tracked(), tracked([], [A]), tracked([A], [B, ONE, ONE])]
    (start,), (behind,), (end,) = masked(grammars, rows, [at(one) for one in rows], roots)
    assert start == {"a", "b"}
    assert behind == {"b", "c"}
    assert end == {"<eos>"}


def test_a_draw_that_will_not_count_is_left_as_it_is(grammars: TreeGrammars) -> None:
    repeated, over, broken = tracked([A, B]), tracked([A], [B, ONE, ONE, EOS]), tracked()
    broken.sequence.error = "as if"
    rows = masked(
        grammars,
        [repeated, over, broken],
        [len(PROMPT), at(over), at(broken)],
        torch.tensor([[9]] * 3),
    )
    assert rows == [[None], [None], [None]]


def test_a_fault_is_noted_at_its_request_alone(grammars: TreeGrammars) -> None:
    lost, well = tracked([C]), tracked([A])  # no response begins with c
    (row, other) = masked(grammars, [lost, well], [at(lost), at(well)], torch.tensor([[9], [9]]))
    assert row == [None]
    assert other == [{"b", "c"}]
    assert lost.sequence.error.startswith("INVALID_INPUT: structured_outputs.regex cannot be")
    assert well.sequence.error == ""


def test_drafts_that_a_fault_keeps_from_being_masked_are_not_followed(
    grammars: TreeGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise GrammarFault("as if a limit were reached")

    monkeypatch.setattr(TreeGrammars, "_descend", broken)
    tokens = torch.tensor([[9, B, C]])
    one = tracked([A])
    rows = masked(grammars, [one], [at(one)], tokens, torch.tensor([[-1, 0, 0]]))
    assert rows == [[{"b", "c"}, None, None]]
    assert tokens.tolist() == [[9, -1, -1]]
    assert one.sequence.error == ""


def test_ranks_are_told_what_the_first_of_them_judged() -> None:
    """A group of one rank: the broadcast of rank 0 returns to rank 0."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(first_rank=0, cpu_group=distributed.group.WORLD)
    ranked = TreeGrammars(read_config(POLICY), POLICY, 0, group)
    try:
        ranked.check(Sampling(1, 1, regex="[äö]"))
        with pytest.raises(InvalidInput, match=r"structured_outputs\.regex.*äö\(\["):
            ranked.check(Sampling(1, 1, regex="äö(["))
    finally:
        ranked.close()
        distributed.destroy_process_group()
