"""EAGLE-3 learns a target with a deterministic next state, if its rows are aligned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from unit.drafter_trainer.samples import (
    HIDDEN,
    TARGET,
    VOCABULARY,
    ToyPolicy,
    chain_logits,
    toy_policy,
)
from unit.speculators.eagle3_rows import packed, row_of

from paceline.speculators.eagle3 import Eagle3Net, Eagle3Options
from paceline.speculators.packed import PackedRow

DEEP = replace(TARGET, num_layers=4)
LENGTH = 6


def random_text(policy: ToyPolicy, seed: int) -> PackedRow:
    """A document of random tokens, so that no state predicts the next token; inner states are
    rotations of the last state.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (LENGTH + 2,), generator=generator)
    hidden = [torch.tanh(torch.randn(HIDDEN, generator=generator))]
    for token in tokens[1:-1]:
        hidden.append(policy.step(hidden[-1], token))
    states, fixed = torch.stack(hidden), torch.Generator().manual_seed(9)
    turns = [torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=fixed)).Q for _ in range(3)]
    return row_of(
        torch.cat([*(states @ turn for turn in turns), states], dim=1),
        tokens,
        layers="1,2,3,last",
        hidden=HIDDEN,
    )


def excess(net: Eagle3Net, row: PackedRow, step: int) -> float:
    """Mean KL of draft `step` from the target over the documents: zero for a drafter that has
    learned it all.
    """
    there, inside = row.ahead(step)
    log_p = (row.next_states[there] @ net.head.T).log_softmax(-1)
    with torch.no_grad():
        log_q = chain_logits(net, row, step + 1)[step].log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1)[inside].mean())


def trained(shift: int) -> tuple[float, float]:
    """KL of the first and the second draft on new documents, after training on tokens moved by
    `shift`.
    """
    policy, steps = toy_policy(), 120
    net = Eagle3Net.fresh(DEEP, Eagle3Options(ttt_steps=2), 0)
    net.bind(policy.embed, policy.head)
    rows = [
        moved(packed([random_text(policy, 24 * n + m) for m in range(24)]), shift)
        for n in range(40)
    ]
    optimizer = torch.optim.Adam(net.parameters(), betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * min(1, (step + 1) / 20) * (1 - step / steps)
        objective = net(rows[step % 39])
        optimizer.zero_grad()
        (objective.loss / objective.positions).backward()
        optimizer.step()
    return excess(net, rows[39], 0), excess(net, rows[39], 1)


def moved(row: PackedRow, shift: int) -> PackedRow:
    """The tokens a drafter reads, moved by some places; targets stay."""
    tokens = row.next_tokens.roll(shift)
    return replace(
        row,
        next_tokens=tokens,
        draft_tokens=torch.where(row.positions < LENGTH - 1, tokens.roll(-1), -1),
    )


@pytest.mark.slow
def test_only_the_right_alignment_learns_the_target() -> None:
    first, second = trained(0)
    for shift in (1, -1):
        shifted_first, shifted_second = trained(shift)
        assert first < 0.55 * shifted_first
        assert second < 0.8 * shifted_second
