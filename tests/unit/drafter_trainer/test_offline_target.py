"""Rows computed by the target's forward, against transformers one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import save_random
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import InvalidInput
from paceline.models.loading import hash_head, read_tensors
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.offline.data import Example
from paceline.services.drafter_trainer.offline.plan import Document
from paceline.services.drafter_trainer.offline.target import TargetModel
from paceline.speculators.base import CaptureSpec
from paceline.training.hugging_face import load_causal_lm

pytestmark = pytest.mark.usefixtures("one_rank")

CAPTURE = CaptureSpec(inner=(0, 2))
HIDDEN = 48


def samples() -> list[Example]:
    random = np.random.default_rng(2)
    return [
        Example(random.integers(3, 97, n), np.arange(n) >= prompt)
        for n, prompt in ((12, 4), (3, 1), (20, 9))
    ]


def documents() -> list[Document]:
    first, second, third = samples()
    return [Document(first, 0, 10), Document(second, 0, 1), Document(third, 5, 8)]


def oracle(model: PreTrainedModel, sample: Example) -> torch.Tensor:
    """[n, 3 H]: what enters layers 0 and 2, and the state after the final norm."""
    with torch.no_grad():
        states = model(
            torch.from_numpy(sample.token_ids)[None], output_hidden_states=True
        ).hidden_states
    return torch.cat([states[0], states[2], states[3]], dim=-1)[0]


def test_a_row_pairs_the_state_at_a_token_with_the_tokens_after_it(tmp_path: Path) -> None:
    model = save_random(tmp_path, "llama")
    target = TargetModel(
        load_causal_lm(tmp_path, torch.float32), tmp_path, CAPTURE, on_cpu(1).mesh, lr=None
    )
    states, _ = target.forward(documents())
    row = target.row(documents(), states)
    assert row.layers == "0,2,last"
    assert row.lm_head_hash == hash_head(read_tensors(tmp_path)["lm_head.weight"])
    t = 0
    for number, document in enumerate(documents()):
        expected, sample = oracle(model, document.sample), document.sample
        for position in range(document.length):
            at = document.start + position
            torch.testing.assert_close(row.states[t], expected[at], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                row.next_states[t], expected[at + 1, -HIDDEN:], atol=1e-5, rtol=1e-5
            )
            assert int(row.next_tokens[t]) == sample.token_ids[at + 1]
            assert int(row.draft_tokens[t]) == sample.token_ids[at + 2]
            assert bool(row.valid[t]) == bool(sample.mask[at + 2])
            assert (int(row.positions[t]), int(row.documents[t])) == (position, number)
            assert int(row.parents[t]) == (t - 1 if position else -1)
            t += 1
    assert t == len(row) == 19


def test_cross_entropy_is_over_the_models_tokens_alone_and_its_gradient_transformers(
    tmp_path: Path,
) -> None:
    model = save_random(tmp_path, "llama")
    target = TargetModel(
        load_causal_lm(tmp_path, torch.float32), tmp_path, CAPTURE, on_cpu(1).mesh, lr=1e-3
    )
    _, found = target.forward(documents())
    expected = torch.zeros(())
    for sample in samples():
        ids, mask = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.mask)
        labels = torch.where(mask, ids, -100)
        expected = expected + functional.cross_entropy(
            model(ids[None]).logits[0, :-1], labels[1:], reduction="sum"
        )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)
    found.backward()
    expected.backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = target.state()
    for name, weight in before.items():
        assert torch.equal(state["model"][f"lm.{name}"].full_tensor(), weight), name
    target.step(1)
    state = target.state()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for name, parameter in model.named_parameters():
        # AdamW's first moment after one step is (1 - beta1) times the clipped gradient: beta1 is
        # 0.9.
        clipped = parameter.grad / max(1.0, float(norm))
        torch.testing.assert_close(
            state["optimizer"][f"lm.{name}"]["exp_avg"].full_tensor(),
            0.1 * clipped,
            atol=1e-6,
            rtol=1e-3,
        )


def test_the_head_follows_a_trained_model_and_its_checkpoint_loads(tmp_path: Path) -> None:
    for family in ("llama", "llama-tied"):
        directory = tmp_path / family
        save_random(directory, family)
        target = TargetModel(
            load_causal_lm(directory, torch.float32),
            directory,
            CaptureSpec(),
            on_cpu(1).mesh,
            lr=1e-2,
        )
        before = target.head()
        _, loss = target.forward(documents())
        loss.backward()
        target.step(1)
        with torch.no_grad():
            target.forward(documents())  # leaves the root gathered
        after, state = target.head(), target.state()
        assert not torch.equal(before.lm_head, after.lm_head)
        assert not torch.equal(before.embed_tokens, after.embed_tokens)
        target.write(
            {n: t.full_tensor() for n, t in state["model"].items()}, tmp_path / f"{family}-base"
        )
        stored = load_file(tmp_path / f"{family}-base" / "model.safetensors")
        assert torch.equal(stored["model.embed_tokens.weight"], after.embed_tokens)
        assert torch.equal(stored.get("lm_head.weight", after.embed_tokens), after.lm_head)
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{family}-base")


def test_a_layer_the_model_lacks_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    with pytest.raises(InvalidInput, match=r"seen: 3,last; allowed: 0 to 2, last"):
        TargetModel(
            load_causal_lm(tmp_path, torch.float32),
            tmp_path,
            CaptureSpec(inner=(3,)),
            on_cpu(1).mesh,
            lr=None,
        )
