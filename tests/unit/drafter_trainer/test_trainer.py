"""The loop: what a preemption keeps, what ends an activation, which drafter a candidate is measured against."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from unit.drafter_trainer.samples import HASH, PROMPT, TARGET, batch, sessions, toy_policy, with_rejected

from drafter_trainer import messages as m
from drafter_trainer.candidates import Candidates
from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.heads import PolicyHeads
from drafter_trainer.learner import DrafterLearner
from drafter_trainer.link import TrainerLink
from drafter_trainer.trainer import DrafterTrainer
from paceline.speculators.eagle import EagleNet
from paceline.streams import FeatureBatch, MemoryStream, encode_features

EVERY = 4
CONFIG = {
    "max_micro_batch_tokens": 32,  # the least: the size then does not depend on the machine's speed
    "data_wait_s": 0.0,
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    "buffer": {"heldout_every": EVERY},
    "gate": {"interval_steps": 1_000, "min_positions": 1},
}


class ScriptedParent:
    """The rank's end of the link. Before micro-batch n come the messages scripted for n."""

    world_size = 1

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.script: list[list[m.Message]] = []

    def poll(self) -> bytes | None:
        if not self.script:
            return None
        if not self.script[0]:
            self.script.pop(0)
            return None
        return m.encode(self.script[0].pop(0))

    def send(self, data: bytes) -> None:
        self.sent.append(m.decode(data))


class Trainer:
    """A trainer over a memory stream and a scripted parent."""

    def __init__(self, directory: Path, **config: object) -> None:
        self.parent, self.stream = ScriptedParent(), MemoryStream("features")
        self.link = TrainerLink(self.parent, self.stream, TARGET)  # type: ignore[arg-type]
        self.link.open_stream()
        self.heads = PolicyHeads()
        self.heads.add(toy_policy().policy_head())
        settings = DrafterTrainerConfig.model_validate({**CONFIG, **config})
        self.candidates = Candidates(directory, TARGET)
        net = EagleNet(TARGET, seed=1)
        self.candidates.save(0, net)
        self.learner = DrafterLearner(net, settings.optimizer, micro_batches=settings.micro_batches_per_step)
        self.trainer = DrafterTrainer(settings, self.learner, self.heads, self.link, self.candidates)

    def feed(self, batches: Iterable[FeatureBatch]) -> None:
        async def append() -> None:
            for one in batches:
                await self.stream.append(*encode_features(one))

        asyncio.run(append())

    def run(self, epoch: int, *, max_steps: int = 0, drafter: int = 0) -> m.Stopped:
        return self.trainer.run_activation(m.Activate(epoch, 0, drafter, max_steps))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.learner.snapshot().state_dict().items()}


def trained_rows(count: int = 12, *, version: int = 0, head: str = HASH) -> list[FeatureBatch]:
    names = sessions(count, heldout=False, every=EVERY)
    return [batch(24, seed, session=name, version=version, head=head) for seed, name in enumerate(names)]


@pytest.mark.usefixtures("one_rank")
def test_a_partial_gradient_outlives_a_preemption(tmp_path: Path) -> None:
    whole, broken = Trainer(tmp_path / "a"), Trainer(tmp_path / "b")
    for trainer in (whole, broken):
        trainer.feed(trained_rows())
    start = whole.weights()
    assert whole.run(1, max_steps=1).micro_batches == 4
    broken.parent.script = [[], [], [m.Preempt(1)]]
    first = broken.run(1)
    assert (first.reason, first.micro_batches, first.steps) == ("preempted", 2, 0)
    second = broken.run(2, max_steps=1)
    assert (second.reason, second.micro_batches, second.steps) == ("max_steps", 2, 1)
    expected, got = whole.weights(), broken.weights()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() < 1e-7
        assert (value - start[name]).abs().max() > 1e-4


@pytest.mark.usefixtures("one_rank")
def test_rejected_rows_in_its_batches_change_no_bit_of_what_is_trained(tmp_path: Path) -> None:
    without, beside = Trainer(tmp_path / "a"), Trainer(tmp_path / "b")
    rows = trained_rows()
    without.feed(rows)
    beside.feed([with_rejected(one) for one in rows])
    stopped = [trainer.run(1, max_steps=2) for trainer in (without, beside)]
    assert stopped[0].loss == stopped[1].loss
    assert stopped[0].tokens == stopped[1].tokens > 0
    expected, got = without.weights(), beside.weights()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("one_rank")
def test_an_activation_ends_without_data_at_its_epochs_and_at_a_preemption_before_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=2.0)
    assert trainer.run(1).reason == "no_data"
    trainer.feed(trained_rows(3, version=7, head="ab" * 8))
    waiting = trainer.run(2)
    assert (waiting.reason, waiting.dropped) == ("no_data", {}), "rows wait for a head that is on its way"
    trainer.heads.add(toy_policy().policy_head("ab" * 8, 7))
    trainer.feed(trained_rows(5))
    done = trainer.run(3)
    positions = 8 * 22
    assert done.reason == "epochs"
    # Tokens count trained positions; the buffer counts prompts' positions too, so it takes a little more than 2 passes.
    assert 2 * positions <= done.tokens < 2 * positions + 32
    trainer.parent.script = [[m.Preempt(4)]]
    assert trainer.run(4) == m.Stopped(4, "preempted", total_steps=done.total_steps)
    for version in range(8, 12):
        trainer.heads.add(toy_policy().policy_head(f"{version:016x}", version))
    assert trainer.run(5).dropped == {"stale_head": 8}


@pytest.mark.usefixtures("one_rank")
def test_one_candidate_an_activation_is_promoted_and_commit_makes_it_the_measure(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 5, "min_positions": 1})
    trainer.feed(trained_rows())
    trainer.feed(batch(24, 50 + i, session=name) for i, name in enumerate(sessions(8, heldout=True, every=EVERY)))
    trainer.run(1, max_steps=60)
    judged = [message for message in trainer.parent.sent if isinstance(message, m.Judged)]
    assert [one.promoted for one in judged] == [False] * (len(judged) - 1) + [True]
    promoted = judged[-1]
    assert promoted.drafter_version == 1
    assert promoted.candidate - promoted.serving > promoted.noise
    assert (promoted.lm_head_hash, promoted.path) == (HASH, str(trainer.candidates.path(1)))
    assert promoted.optimizer_steps % 5 == 0
    assert trainer.trainer.serving.version == 0

    trainer.parent.sent.clear()
    trainer.run(2, max_steps=5, drafter=1)
    (after,) = [message for message in trainer.parent.sent if isinstance(message, m.Judged)]
    assert after.drafter_version == 2
    assert after.serving == pytest.approx(promoted.candidate, abs=1e-9), "the same net on the same held-out rows"
    trainer.trainer.on_serving(0)
    rolled_back = trainer.trainer.serving.net.state_dict()
    assert all(torch.equal(value, rolled_back[name]) for name, value in EagleNet(TARGET, seed=1).state_dict().items())
    trainer.trainer.on_serving(9)
    assert trainer.trainer.serving.version == 0, "a drafter that is not kept here is no measure"


@pytest.mark.usefixtures("one_rank")
def test_a_preemption_interrupts_a_judgement_and_the_next_activation_ends_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 1, "min_positions": 1, "samples": 32})
    trainer.feed(trained_rows())
    trainer.feed(batch(60, 50 + i, session=name) for i, name in enumerate(sessions(32, heldout=True, every=EVERY)))
    # Four micro-batches are one step; then the candidate is frozen; then come pieces of held-out rows.
    trainer.parent.script = [[], [], [], [], [], [], [m.Preempt(1)]]
    stopped = trainer.run(1)
    assert (stopped.reason, stopped.micro_batches, stopped.steps) == ("preempted", 4, 1)
    assert not [message for message in trainer.parent.sent if isinstance(message, m.Judged)]
    trainer.run(2, max_steps=1)
    (judged,) = [message for message in trainer.parent.sent if isinstance(message, m.Judged)]
    assert (judged.epoch, judged.positions) == (2, 32 * (60 - PROMPT))


@pytest.mark.usefixtures("one_rank")
def test_a_state_stays_as_it_was_and_resumes_exactly(tmp_path: Path) -> None:
    first = Trainer(tmp_path / "a")
    first.feed(trained_rows())
    first.run(1, max_steps=3)
    state, then = first.trainer.state(), first.weights()
    taken = state["learner"]["optimizer"]["state"]["fc.weight"]
    moments = {name: taken[name].full_tensor().clone() for name in ("exp_avg", "exp_avg_sq")}
    first.run(2, max_steps=2)
    assert all(torch.equal(state["learner"]["model"][name].full_tensor(), value) for name, value in then.items())
    assert all(torch.equal(taken[name].full_tensor(), value) for name, value in moments.items())
    resumed = Trainer(tmp_path / "b")
    resumed.trainer.load_state(state)
    assert resumed.trainer.standing().total_steps == 3
    assert all(torch.equal(resumed.weights()[name], value) for name, value in then.items())


def test_candidates_keep_the_newest_and_what_serves(tmp_path: Path) -> None:
    candidates = Candidates(tmp_path, TARGET)
    candidates.save(0, EagleNet(TARGET, seed=0))
    candidates.serves(0)
    for version in range(1, 4):
        candidates.save(version, EagleNet(TARGET, seed=version))
    candidates.serves(1)
    for version in range(4, 9):
        candidates.save(version, EagleNet(TARGET, seed=version))
    assert candidates.versions == [0, 1, 5, 6, 7, 8]
    loaded = candidates.load(6)
    assert loaded is not None
    assert torch.equal(loaded.fc.weight, EagleNet(TARGET, seed=6).fc.weight)
    assert candidates.load(3) is None
