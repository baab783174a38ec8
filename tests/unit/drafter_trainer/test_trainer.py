"""The training loop: preemption, ends of an activation, and the drafter that a candidate is
measured against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from twin_kind import TwinNet
from unit.drafter_trainer.samples import (
    HASH,
    PROMPT,
    TARGET,
    batch,
    sessions,
    toy_policy,
)
from whole_tensors import whole_of

from paceline.errors import InvalidInput
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig, GateConfig
from paceline.services.drafter_trainer.gate.round import Candidates
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.rows.sample import sample_from
from paceline.services.drafter_trainer.rows.store import KEPT_HEADS, RowStore
from paceline.services.drafter_trainer.trainer import DrafterTrainer, TrainerLink
from paceline.speculators.eagle import EagleNet
from paceline.speculators.net import DraftNet, read_drafter
from paceline.streams import FeatureBatch
from paceline.training.shards import tensors_of

EVERY = 4
CONFIG = {
    "max_micro_batch_tokens": 32,  # the least: the size then does not depend on the machine's speed
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    "buffer": {"judged_every": EVERY},
}
CONSTANTS = {"data_wait_s", "micro_batch_ms"}
"""Constants of the settings' class, set here for one trainer."""
FRESH, LENGTH = 8, 24  # samples to judge by, and their tokens
GATE = {"interval_steps": 1_000, "min_positions": FRESH * (LENGTH - PROMPT)}


class ScriptedParent:
    """The rank's end of the link. Before micro-batch n come the messages scripted for n."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.script: list[list[m.Message]] = []
        self.epoch = 0  # of the running activation
        self.preempt_at = ""  # a decision that ends the activation
        self.on_judged: Callable[[], None] = lambda: None

    def poll(self) -> bytes | None:
        if not self.script:
            return None
        if not self.script[0]:
            self.script.pop(0)
            return None
        return m.MESSAGES.encode(self.script[0].pop(0))

    def send(self, data: bytes) -> None:
        self.sent.append(message := m.MESSAGES.decode(data))
        if isinstance(message, m.Judged):
            self.on_judged()
            if message.decision == self.preempt_at:
                self.script = [[m.Preempt(self.epoch)]]


class Trainer:
    """A trainer over a scripted parent."""

    def __init__(
        self,
        directory: Path,
        *,
        gate: Mapping[str, object] | None = None,
        start: DraftNet | None = None,
        **config: object,
    ) -> None:
        """`start`: the first network; without it, fresh weights."""
        self.parent = ScriptedParent()
        wanted = {"data_wait_s": 0.0, **CONFIG, **config, "gate": {**GATE, **(gate or {})}}
        settings = DrafterTrainerConfig.model_validate(
            {key: value for key, value in wanted.items() if key not in CONSTANTS}
        )
        for key in CONSTANTS & wanted.keys():
            vars(settings)[key] = wanted[key]
        self.rows = RowStore(settings.buffer, 0, batch_bytes=1 << 20)
        self.rows.add_head(toy_policy().policy_head())
        self.candidates = Candidates(directory, TARGET)
        net = start or EagleNet(TARGET, seed=1)
        self.candidates.save(0, net)
        self.learner = DrafterLearner(
            net, settings.optimizer, micro_batches=settings.micro_batches_per_step
        )
        link = TrainerLink(self.parent)  # type: ignore[arg-type]
        self.trainer = DrafterTrainer(settings, self.learner, self.rows, link, self.candidates)

    def feed(self, batches: Iterable[FeatureBatch]) -> None:
        self.rows.add([sample_from(one, TARGET) for one in batches])

    def feed_always(self, batches: Sequence[FeatureBatch]) -> None:
        """Rows to judge by, and the same again whenever they have judged."""
        self.feed(batches)
        self.parent.on_judged = lambda: self.feed(batches)

    def run(
        self,
        epoch: int,
        *,
        max_steps: int = 0,
        drafter: int = 0,
        until: str = "",
        accepted: float = 0.0,
    ) -> m.Stopped:
        self.parent.preempt_at, self.parent.epoch = until, epoch
        lengths = {"eagle:5_1_6": accepted} if accepted else {}
        return self.trainer.run_activation(
            m.Activate(epoch, 0, drafter, max_steps, accept_lengths=lengths)
        )

    def learn_at(self, lr: float) -> None:
        """The learning rate from now on."""
        optimizer = self.learner.sharded.optimizer
        optimizer._config = optimizer._config.model_copy(update={"lr": lr})

    def judged(self, *decisions: str) -> list[m.Judged]:
        """Return the gate's judgements, limited to these decisions if any are named."""
        said = [message for message in self.parent.sent if isinstance(message, m.Judged)]
        return [one for one in said if not decisions or one.decision in decisions]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.learner.snapshot().state_dict().items()}


def fresh_rows(count: int = FRESH, length: int = LENGTH, **batch_of: Any) -> list[FeatureBatch]:
    names = sessions(count, heldout=True, every=EVERY)
    return [batch(length, 50 + i, session=name, **batch_of) for i, name in enumerate(names)]


def trained_rows(count: int = 12, *, version: int = 0, head: str = HASH) -> list[FeatureBatch]:
    names = sessions(count, heldout=False, every=EVERY)
    return [
        batch(24, seed, session=name, version=version, head=head) for seed, name in enumerate(names)
    ]


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
def test_an_activation_ends_without_data_at_its_epochs_and_at_a_preemption_before_it(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, max_epochs=2.0)
    assert trainer.run(1).reason == "no_data"
    trainer.feed(trained_rows(3, version=7, head="ab" * 8))
    waiting = trainer.run(2)
    assert (waiting.reason, waiting.dropped) == ("no_data", {}), (
        "rows wait for a head that is on its way"
    )
    trainer.rows.add_head(toy_policy().policy_head("ab" * 8, 7))
    trainer.feed(trained_rows(5))
    done = trainer.run(3)
    positions = 8 * 22
    assert done.reason == "epochs"
    # Tokens count trained positions; the buffer counts prompts' positions too, so it takes a little
    # more than 2 passes.
    assert 2 * positions <= done.tokens < 2 * positions + 32
    trainer.parent.script = [[m.Preempt(4)]]
    assert trainer.run(4) == m.Stopped(4, "preempted", total_steps=done.total_steps)
    for version in range(8, 12):
        trainer.rows.add_head(toy_policy().policy_head(f"{version:016x}", version))
    assert trainer.run(5).dropped == {"stale_head": 8}


@pytest.mark.usefixtures("one_rank")
def test_one_candidate_an_activation_is_promoted_and_commit_makes_it_the_measure(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 5})
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    trainer.run(1, max_steps=60, until="promoted")
    judged = trainer.judged()
    assert [one.decision for one in judged] == ["kept"] * (len(judged) - 1) + ["promoted"]
    promoted = judged[-1]
    assert (promoted.drafter_version, promoted.kind, promoted.temperature) == (1, "eagle", 0.0)
    assert promoted.candidate - promoted.serving > promoted.noise
    assert promoted.candidate == pytest.approx(1 + sum(promoted.survival))
    assert (promoted.lm_head_hash, promoted.path) == (HASH, str(trainer.candidates.path(1)))
    assert promoted.optimizer_steps % 5 == 0
    assert trainer.trainer.gate.serving.version == 0

    trainer.parent.sent.clear()
    trainer.run(2, max_steps=6, drafter=1)
    (after,) = trainer.judged()
    assert after.drafter_version == 2
    assert after.serving == pytest.approx(promoted.candidate, abs=1e-9), (
        "the same net on the same rows"
    )
    trainer.trainer.gate.on_serving(0)
    rolled_back = trainer.trainer.gate.serving.net.state_dict()
    assert all(
        torch.equal(value, rolled_back[name])
        for name, value in EagleNet(TARGET, seed=1).state_dict().items()
    )
    trainer.trainer.gate.on_serving(9)
    assert trainer.trainer.gate.serving.version == 0, (
        "a drafter that is not kept here is no measure"
    )


@pytest.mark.usefixtures("one_rank")
def test_a_round_of_the_gate_begins_every_so_many_steps(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 5})
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    trainer.learn_at(1e-12)
    trainer.run(1, max_steps=16)
    assert [one.optimizer_steps for one in trainer.judged("kept")] == [5, 10, 15]


@pytest.mark.usefixtures("one_rank")
def test_a_round_of_the_gate_begins_at_once_where_rollouts_accept_far_less(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 20})
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    trainer.learn_at(1e-12)
    trainer.run(1, max_steps=7, accepted=4.0)
    assert not trainer.judged()
    trainer.run(2, max_steps=3, accepted=2.5)
    assert [one.optimizer_steps for one in trainer.judged("kept")] == [7]
    trainer.run(3, max_steps=3, accepted=2.5)
    assert len(trainer.judged()) == 1, "there are no rows of a newer policy"
    trainer.rows.add_head(toy_policy().policy_head("ab" * 8, 1))
    trainer.feed_always(fresh_rows(version=1, head="ab" * 8))
    trainer.run(4, max_steps=3, accepted=2.5)
    assert [one.policy_version for one in trainer.judged("kept")] == [0, 1]


@pytest.mark.usefixtures("one_rank")
def test_a_preemption_interrupts_a_judgement_and_the_next_activation_ends_it(
    tmp_path: Path,
) -> None:
    trainer = Trainer(
        tmp_path, max_epochs=1e6, gate={"interval_steps": 1, "min_positions": 32 * (60 - PROMPT)}
    )
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows(32, 60))
    # Four micro-batches are one step; then the candidate is frozen; then come pieces of
    # fresh rows.
    trainer.parent.script = [[], [], [], [], [], [], [m.Preempt(1)]]
    stopped = trainer.run(1)
    assert (stopped.reason, stopped.micro_batches, stopped.steps) == ("preempted", 4, 1)
    assert not trainer.judged()
    trainer.run(2, max_steps=1)
    (judged,) = trainer.judged()
    assert judged.positions == 32 * (60 - PROMPT)


@pytest.mark.usefixtures("one_rank")
def test_costs_that_the_engine_has_measured_make_the_speed_ups(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 4})
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    costs = {"eagle:5_1_6": 1.5, "other:5_1_6": 6.0}
    measured = [m.RoundCosts(8, 1.0, costs, rival=1.0)]
    trainer.trainer.run_activation(m.Activate(1, 0, 0, 5, round_costs=measured))
    assert trainer.judged()
    for one in trainer.judged():
        assert one.costs_measured
        assert one.candidate_speedup == pytest.approx(max(1.0, one.candidate / 1.5))


@pytest.mark.usefixtures("one_rank")
def test_a_drafter_that_was_taken_back_has_to_be_beaten_too(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 1})
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    trainer.run(1, until="promoted")
    (promoted,) = trainer.judged("promoted")
    trainer.learn_at(1e-12)
    trainer.trainer.gate.on_serving(1)
    assert trainer.trainer.gate.state()["taken_back_version"] == 0
    trainer.trainer.gate.on_serving(0)  # live acceptance fell
    assert trainer.trainer.gate.state()["taken_back_version"] == 1
    trainer.parent.sent.clear()
    trainer.run(2, max_steps=3)
    rolled_back, *later = trainer.judged()
    assert (rolled_back.decision, rolled_back.drafter_version) == ("rolled_back", 1)
    assert (rolled_back.candidate, rolled_back.serving) == (promoted.candidate, promoted.serving)
    assert [one.decision for one in later] == ["kept"] * 2
    assert all(one.candidate - one.serving > one.noise for one in later), (
        "it would be promoted again at once"
    )
    trainer.learn_at(1e-2)
    trainer.run(3, until="promoted")
    (again,) = trainer.judged("promoted")
    assert again.drafter_version == 2
    assert again.candidate > promoted.candidate


@pytest.mark.usefixtures("one_rank")
def test_what_is_promoted_and_does_not_serve_yet_has_to_be_beaten(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, max_epochs=1e6, gate={"interval_steps": 1})
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    trainer.run(1, until="promoted")
    trainer.learn_at(1e-12)
    trainer.parent.sent.clear()
    trainer.run(2, max_steps=3)
    assert [one.decision for one in trainer.judged()] == ["kept"] * 2
    assert all(one.candidate - one.serving > one.noise for one in trainer.judged())

    # Rows of the next policy: a set has been committed, and it was without the promotion.
    trainer.rows.add_head(toy_policy().policy_head(HASH, 1))
    trainer.feed(trained_rows(version=1))
    trainer.feed_always(fresh_rows(version=1))
    trainer.run(3, max_steps=3, until="promoted")
    assert trainer.judged("promoted")


@pytest.mark.usefixtures("one_rank")
def test_training_freezes_when_nothing_is_gained_and_drift_reopens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GateConfig, "freeze_after", 3)
    monkeypatch.setattr(GateConfig, "freeze_gain", 10.0)
    settings = {"interval_steps": 1, "drafts": "likeliest"}  # tiny steps change no draft
    trainer = Trainer(tmp_path, max_epochs=1e6, gate=settings)
    trainer.feed(trained_rows())
    trainer.feed_always(fresh_rows())
    trainer.learn_at(1e-12)
    trainer.run(1, max_steps=5)
    assert len(trainer.judged("kept")) > 3
    assert not trainer.judged("frozen"), "a fresh drafter that is not beaten yet is still learning"
    trainer.learn_at(1e-2)
    trainer.run(2, max_steps=30)
    trainer.run(3, until="promoted")
    trainer.learn_at(1e-12)
    stopped = trainer.run(4, drafter=2)
    (frozen,) = trainer.judged("frozen")
    assert stopped.reason == "frozen"
    assert (stopped.steps, trainer.trainer.gate.frozen) == (3, True)
    assert (again := trainer.run(5, drafter=2)).reason == "frozen"
    assert again.micro_batches == 0, "the slots stay free"

    # The next policy's rows are the same: no drift. The rows after them have an embedding that it
    # never saw.
    trainer.rows.add_head(toy_policy().policy_head("ab" * 8, 1))
    trainer.feed(fresh_rows(version=1, head="ab" * 8))
    assert trainer.run(6, drafter=2).reason == "frozen"
    assert not trainer.judged("reopened")
    moved = toy_policy().policy_head("cd" * 8, 2)
    trainer.rows.add_head(dataclasses.replace(moved, embed_tokens=moved.embed_tokens.roll(1, 0)))
    trainer.feed(trained_rows(version=2, head="cd" * 8))  # while it rests these are fresh, too
    assert trainer.run(7, max_steps=1, drafter=2).reason == "max_steps"
    (reopened,) = trainer.judged("reopened")
    assert (reopened.policy_version, reopened.drafter_version) == (2, 2)
    assert frozen.serving - reopened.serving > reopened.noise


def forgetful(tmp_path: Path) -> tuple[Trainer, DraftNet, int]:
    """Return a trainer, the run's first drafter and the serving version.

    The serving drafter has forgotten the tasks that return; the first drafter has not. The first
    drafter has learned rows with the policy's embedding, its successors rows with another
    embedding.
    """
    before = Trainer(tmp_path / "before", max_epochs=1e6)
    before.feed(trained_rows())
    before.run(1, max_steps=40)
    first, folder = before.learner.snapshot(), tmp_path / "first"
    first.save(folder)

    trainer = Trainer(
        tmp_path / "run",
        max_epochs=1e6,
        gate={"interval_steps": 1},
        start=read_drafter(folder, TARGET),
        drafter=str(folder),
    )
    policy = toy_policy()
    other = policy.policy_head("ab" * 8, 1)
    trainer.rows.add_head(dataclasses.replace(other, embed_tokens=other.embed_tokens.roll(1, 0)))
    trainer.feed(trained_rows(version=1, head="ab" * 8))
    trainer.feed_always(fresh_rows(version=1, head="ab" * 8))
    trainer.run(1, max_steps=40, until="promoted")
    version = 0
    for epoch in range(2, 6):
        version = trainer.judged("promoted")[-1].drafter_version
        trainer.run(epoch, max_steps=20, drafter=version, until="promoted")
    learned = trainer.judged()[-1]
    assert learned.serving > 1.5

    trainer.rows.add_head(policy.policy_head("cd" * 8, 2))
    trainer.learn_at(1e-12)
    trainer.parent.sent.clear()
    trainer.feed(trained_rows(version=2, head="cd" * 8))
    trainer.feed_always(fresh_rows(version=2, head="cd" * 8))
    return trainer, first, version


@pytest.mark.usefixtures("one_rank")
def test_the_runs_first_drafter_serves_again_when_tasks_come_that_its_successors_have_forgotten(
    tmp_path: Path,
) -> None:
    trainer, first, version = forgetful(tmp_path)
    taught = trainer.learner.total_steps
    trainer.run(7, max_steps=3, drafter=version, until="promoted")
    (back,) = trainer.judged("promoted")
    assert back.candidate - back.serving > back.noise
    assert (back.optimizer_steps, back.over) == (0, version)
    again = read_drafter(trainer.candidates.path(back.drafter_version), TARGET)
    kept = first.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in again.state_dict().items())
    assert all(torch.equal(value, kept[name]) for name, value in trainer.weights().items())
    assert trainer.learner.total_steps >= taught > 0, "steps are counted on"
    trainer.run(8, max_steps=1, drafter=back.drafter_version)
    assert not all(torch.equal(value, kept[name]) for name, value in trainer.weights().items())


@pytest.mark.usefixtures("one_rank")
def test_a_round_of_the_gate_judges_with_the_heads_it_began_with_whatever_heads_come_meanwhile(
    tmp_path: Path,
) -> None:
    trainer, _, version = forgetful(tmp_path)
    gate = trainer.trainer.gate
    trainer.run(7, max_steps=1, drafter=version)
    gate.start()
    for number in range(3, 4 + KEPT_HEADS):  # of later policy steps, between two activations
        trainer.rows.add_head(toy_policy().policy_head(f"{number:016x}", number))
    assert trainer.rows.heads.get("cd" * 8) is None
    while gate.judging:
        trainer.parent.sent += gate.advance()
    (back,) = trainer.judged("promoted")
    assert (back.optimizer_steps, back.policy_version) == (0, 2), "it looked back"


@pytest.mark.usefixtures("one_rank")
def test_a_state_stays_as_it_was_and_resumes_exactly(tmp_path: Path) -> None:
    first = Trainer(tmp_path / "a")
    first.feed(trained_rows())
    first.run(1, max_steps=3)
    state, then = first.trainer.state(), first.weights()
    taken = {name: whole_of(value).clone() for name, value in tensors_of(state["learner"])}
    assert {"model/fc.weight", "average/fc.weight", "exp_avg/fc.weight"} <= {*taken}
    first.run(2, max_steps=2)
    for name, value in tensors_of(state["learner"]):
        assert torch.equal(whole_of(value), taken[name]), name
    assert all(torch.equal(taken[f"average/{name}"], value) for name, value in then.items())
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
    for name in ("config.json", "model.safetensors"):
        file = candidates.path(7) / name
        data = file.read_bytes()
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        assert candidates.load(7) is None
        file.write_bytes(data)
    assert candidates.load(7) is not None


def test_a_kind_by_import_path_comes_back_from_the_disk(tmp_path: Path) -> None:
    net = TwinNet(TARGET, seed=3)
    Candidates(tmp_path, TARGET).save(1, net)
    loaded = Candidates(tmp_path, TARGET, [TwinNet.kind]).load(1)
    assert isinstance(loaded, TwinNet)
    assert torch.equal(loaded.fc.weight, net.fc.weight)
    with pytest.raises(InvalidInput, match="architectures names no speculator here"):
        Candidates(tmp_path, TARGET).load(1)


@pytest.mark.usefixtures("one_rank")
def test_micro_batches_are_as_long_as_the_slowest_drafter_learns_from_in_its_time(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, max_micro_batch_tokens=1_000, micro_batch_ms=20.0)
    sizes = []
    for seconds_per_token in (0.0, 1e-4, 1e-6, 1.0):
        trainer.trainer.seconds_per_token = seconds_per_token
        sizes.append(trainer.rows.shape())
    assert sizes == [(1, 32), (1, 200), (1, 1_000), (1, 32)]


@pytest.mark.usefixtures("one_rank")
def test_one_rank_alone_trains_a_plain_module(tmp_path: Path) -> None:
    modules = list(Trainer(tmp_path).learner.sharded.net.modules())
    assert not any(isinstance(module, FSDPModule) for module in modules)
