"""The DFlash network and its objective, against float64 numpy written from the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from unit.drafter_trainer.samples import chain_logits
from unit.speculators.dflash_rows import BLOCK, arrays, block_logits, formula, rough_net
from unit.speculators.eagle3_rows import TARGET, document, inner_of, packed

from paceline.errors import ConfigError, DataLoss, InvalidInput
from paceline.speculators import dflash as dflash_net
from paceline.speculators import packed as packed_rows
from paceline.speculators.dflash import DflashNet, DflashOptions
from paceline.speculators.net import Objective
from paceline.speculators.packed import PackedRow


@pytest.mark.parametrize("targets", ["distribution", "drawn"])
def test_loss_is_the_papers_over_packed_documents(targets: str) -> None:
    net = rough_net(targets=targets)
    rows = [document(9, 1), document(2, 2), document(11, 3)]
    loss, positions, terms = net(packed(rows))
    expected = formula(arrays(net), rows, drawn=targets == "drawn")
    assert float(loss.detach()) == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert int(positions) == sum(int(row.valid.sum()) for row in rows)
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert float(terms[name]) == pytest.approx(value, rel=1e-5), name


def test_gradients_are_those_of_the_formula() -> None:
    net = rough_net()
    rows = [document(4, 1), document(3, 2)]
    net(packed(rows)).loss.backward()
    w, named = arrays(net), dict(net.named_parameters())
    places = [
        ("fc.weight", (3, 20)),
        ("hidden_norm.weight", (4,)),
        ("layers.0.self_attn.k_proj.weight", (2, 7)),
        ("layers.1.self_attn.k_norm.weight", (3,)),
        ("layers.0.mlp.down_proj.weight", (1, 7)),
        ("norm.weight", (5,)),
    ]
    for name, place in places:
        slopes = []
        for move in (1e-5, -1e-5):
            moved = w[name].copy()
            moved[place] += move
            slopes.append(formula({**w, name: moved}, rows)["loss"] / (2 * move))
        gradient = named[name].grad
        assert gradient is not None
        assert float(gradient[place]) == pytest.approx(sum(slopes), rel=1e-3, abs=1e-4)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_chain_logits_are_those_of_a_block_at_each_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_rows, "TOGETHER", 3)
    monkeypatch.setattr(dflash_net, "JUDGED_TOGETHER", 7)
    net, rows = rough_net(), [document(4, 3), document(10, 4)]
    with torch.no_grad():
        chain = chain_logits(net, packed(rows), BLOCK + 3)
    assert len(chain) == BLOCK - 1
    w, begin = arrays(net), 0
    for row in rows:
        inner = inner_of(row)
        for t in range(len(row)):
            token = int(row.next_tokens[t])
            expected = block_logits(w, inner[: t + 1], range(t + 1), token, t + 1)
            for logits, one in zip(chain, expected, strict=True):
                np.testing.assert_allclose(logits[begin + t].numpy(), one, atol=2e-4)
        begin += len(row)


def gradients(net: DflashNet, rows: list[PackedRow]) -> dict[str, torch.Tensor]:
    net.zero_grad()
    for row in rows:
        net(row).loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def test_packed_documents_learn_as_separate_ones() -> None:
    net, rows = rough_net(), [document(9, 1), document(1, 2), document(13, 3)]
    with torch.no_grad():
        together, apart = net(packed(rows)), [net(row) for row in rows]
    assert float(together.loss) == pytest.approx(sum(float(one.loss) for one in apart), rel=1e-5)
    for name, value in together.terms.items():
        assert float(value) == pytest.approx(sum(float(one.terms[name]) for one in apart), rel=1e-5)
    of_packed, of_separate = gradients(net, [packed(rows)]), gradients(net, rows)
    for name, gradient in of_separate.items():
        torch.testing.assert_close(
            of_packed[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
        )


def test_attention_in_stretches_is_attention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, row = rough_net(), packed([document(9, 1), document(13, 3)])
    whole = gradients(net, [row])
    monkeypatch.setattr(packed_rows, "TOGETHER", 2)
    for name, gradient in gradients(net, [row]).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-4)


def test_a_token_or_state_changes_no_block_before_it_and_no_neighbour() -> None:
    net, row = rough_net(), packed([document(8, 1), document(8, 2), document(8, 3)])
    at = 11
    tokens, states = row.next_tokens.clone(), row.states.clone()
    tokens[at] = (tokens[at] + 1) % TARGET.vocab_size
    states[at] += 1.0

    def changed(other: PackedRow) -> list[set[int]]:
        with torch.no_grad():
            pairs = zip(chain_logits(net, row, 9), chain_logits(net, other, 9), strict=True)
            return [set((a != b).any(-1).nonzero()[:, 0].tolist()) for a, b in pairs]

    of_token = changed(replace(row, next_tokens=tokens))
    of_state = changed(replace(row, states=states))
    # A token is read by the block that begins with it alone, a state by all blocks behind it.
    assert of_token == [{at}] * (BLOCK - 1)
    assert of_state == [set(range(at, 16))] * (BLOCK - 1)


def test_a_row_without_drafting_targets_costs_nothing() -> None:
    net, row = rough_net(), document(5, 1)
    loss, positions, terms = net(replace(row, valid=torch.zeros(5, dtype=torch.bool)))
    loss.backward()
    assert (float(loss.detach()), int(positions), float(terms["correct"])) == (0.0, 0, 0.0)
    # Ranks of FSDP2 must agree on which gradients there are.
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_blocks_of_a_row_are_bounded_and_drawn_by_its_tokens_alone() -> None:
    net, row = rough_net(blocks_per_row=4), document(40, 1)
    anchors = net.anchors(row)
    assert len(anchors) == 4
    assert row.valid[anchors].all()
    assert torch.equal(net.anchors(row), anchors)
    others = [net.anchors(document(40, seed)) for seed in range(2, 6)]
    assert any(not torch.equal(one, anchors) for one in others)
    objective = net(row)
    assert isinstance(objective, Objective)
    only = torch.zeros_like(row.valid).index_fill(0, anchors, value=True)
    assert int(objective.positions) == 4
    first = net(replace(row, valid=only)).terms["loss_0"]
    assert float(objective.terms["loss_0"]) == pytest.approx(float(first), rel=1e-5)


def test_padding_changes_neither_loss_nor_gradients() -> None:
    net, row = rough_net(), packed([document(9, 1), document(6, 2)])
    plain, padded = gradients(net, [row]), gradients(net, [row.padded(5)])
    for name, gradient in plain.items():
        torch.testing.assert_close(padded[name], gradient, rtol=1e-5, atol=1e-5)


def test_rows_without_the_inner_states_are_refused_by_name() -> None:
    net, row = rough_net(), document(5, 1)
    with pytest.raises(DataLoss, match="lack states the drafter reads: 2, 4, 5"):
        net(replace(row, states=row.states[:, -TARGET.hidden_size :], layers="last"))


def test_the_default_mask_is_the_last_row_that_ends_no_sequence() -> None:
    def mask_of(**settings: object) -> int:
        target = replace(TARGET, **settings)  # type: ignore[arg-type]
        return DflashNet.fresh(target, DflashOptions(), 0).shape.mask_token_id

    assert mask_of() == TARGET.vocab_size - 1
    assert mask_of(eos_token_ids=(36, 35)) == 34


def test_a_fresh_drafter_that_cannot_be_is_refused() -> None:
    def fresh(layers: int = 8, **options: object) -> DflashNet:
        given = DflashOptions.model_validate(options)
        return DflashNet.fresh(replace(TARGET, num_layers=layers), given, 0)

    with pytest.raises(InvalidInput, match=r"mask_token_id.*seen: 37; allowed: 0 to 36"):
        fresh(mask_token_id=37)
    with pytest.raises(ConfigError, match=r"too shallow for DFlash; seen: 3"):
        fresh(layers=3)
    with pytest.raises(ConfigError, match="ascending layers of 1 to 7"):
        fresh(inner_layers=(4, 8))
    with pytest.raises(ConfigError, match="option block_size of dflash"):
        DflashNet.read_options({"block_size": 1})
    assert fresh(layers=3, inner_layers=(1,)).capture.layers == "1,last"


def test_a_block_learns_a_repeating_pattern() -> None:
    """Tokens repeat with a period of six; every state is noise plus its own token."""
    period, generator = 6, torch.Generator().manual_seed(0)
    net = DflashNet.fresh(TARGET, DflashOptions(mask_token_id=36, targets="drawn"), 1)
    embed = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    net.bind(embed, 0.3 * embed)

    def text(phase: int) -> PackedRow:
        row = document(24, phase)
        tokens = (torch.arange(26) + phase) % period
        states = torch.cat([embed[tokens[:24]]] * 5, dim=1)
        noise = 0.3 * torch.randn(states.shape, generator=generator)
        valid = torch.ones(24, dtype=torch.bool)
        return replace(
            row,
            states=states + noise,
            next_tokens=tokens[1:-1],
            draft_tokens=tokens[2:],
            valid=valid,
        )

    def right(row: PackedRow) -> list[float]:
        with torch.no_grad():
            chain = chain_logits(net, row, 7)
        found = []
        for step, logits in enumerate(chain):
            there, inside = row.ahead(step)
            found.append(
                float((logits.argmax(-1) == row.draft_tokens[there])[inside].float().mean())
            )
        return found

    judged = packed([text(phase) for phase in range(period)])
    assert max(right(judged)) < 0.5
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, betas=(0.9, 0.98))
    for step in range(80):
        objective = net(packed([text(step), text(step + 3)]))
        optimizer.zero_grad()
        (objective.loss / objective.positions).backward()
        optimizer.step()
    assert min(right(judged)) > 0.9
