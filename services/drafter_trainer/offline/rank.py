"""Trains a drafter offline on one rank: the policy's forward over conversations, and the online
trainer's learner over its states.

Rows depend on the seed and the step alone. A resumed run therefore continues with the same rows,
for any number of ranks with the same rows per step.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from paceline.errors import ConfigError, InvalidInput, PacelineError
from paceline.models.config import read_config
from paceline.models.loading import DTYPES
from paceline.models.products import STEP, spare_rows, use_linear
from paceline.ranks.group import RankLink
from paceline.services.drafter_trainer.config import FIXED, OfflineConfig
from paceline.services.drafter_trainer.gate.evaluate import GREEDY, chain_survival
from paceline.services.drafter_trainer.learn import learner, membership
from paceline.services.drafter_trainer.offline import data
from paceline.services.drafter_trainer.rows.sample import (
    FeatureSample,
    PolicyHead,
    load_policy_head,
    pack,
)
from paceline.speculators import base, shift
from paceline.speculators.net import DraftNet, trained_net
from paceline.speculators.packed import PackedRow
from paceline.training import checkpoints, first_fit, shards
from paceline.training.process import COLLECTIVE_S, from_all_ranks, join_ranks

Report = Callable[[dict[str, Any]], None]
FAREWELL_S = 10.0
OPEN_ROWS = 32
STATE_BYTES = 1 << 30
"""Most bytes of states and targets that are kept for further passes over the data."""
DRAFTS = 5
"""Drafts of an evaluated chain."""


class OfflineRun:
    """One rank of the run; every public method is collective."""

    def __init__(
        self,
        config: OfflineConfig,
        net: DraftNet,
        lm: Any,
        samples: Sequence[data.Example],
        report: Report,
    ) -> None:
        self._config, self._report, self._file = config, report, config.out / "log.jsonl"
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._members = membership.on_cpu(self._world)
        self._capture, self._head = net.capture, load_policy_head(config.model, 0)
        # no dropout, so the states equal the engine's
        self._policy = lm.model.requires_grad_(requires_grad=False).eval()
        use_linear(self._policy)
        for part in (*lm.model.layers, lm.model):
            fully_shard(part, mesh=self._members.mesh)
        self._states: dict[int, FeatureSample] = {}  # by identity of the example
        self._room = STATE_BYTES
        self._train, self._heldout = split(samples, config.heldout_share, config.seed)
        # A number of ranks with another number of rows per step would skip or repeat rows.
        self._settings = config.model_dump(mode="json", include=FIXED) | {
            "rows_per_step": config.rows_per_step,
            "data": data.fingerprint(samples),
        }
        self._learner = learner.DrafterLearner(
            net, config, micro_batches=config.rows_per_step, members=self._members
        )
        rows = sum(1 for _ in rows_of(self._train, config, config.epochs))
        self.steps = config.steps or -(-rows // config.rows_per_step)
        self._writer = checkpoints.CheckpointWriter(config.out / "states", self._export)
        self._resume()

    @property
    def step(self) -> int:
        """Finished optimiser steps, over all processes of the run."""
        return self._learner.total_steps

    def run(self, stopping: Callable[[], bool]) -> bool:
        """Trains until the end, or until a rank is `stopping`, and saves. Returns whether it
        reached the end.
        """
        config, saved = self._config, self.step or -1
        rows = islice(rows_of(self._train, config), self.step * config.rows_per_step, None)
        while self.step < self.steps and not any(from_all_ranks(stopping())):
            self._train_step([*islice(rows, config.rows_per_step)])
            if self.step == self.steps or self.step % config.eval_every == 0:
                self._evaluate()
            if self.step == self.steps or self.step % config.save_every == 0:
                self._save()
                saved = self.step
        if saved != self.step:
            self._save()
        self._writer.wait()
        return self.step >= self.steps

    def _packed(self, row: Sequence[data.Example], random: np.random.Generator) -> PackedRow:
        """A random window of each sequence. Collective."""
        window, found = self._config.window, [self._states.get(id(one)) for one in row]
        lacking = [number for number, sample in enumerate(found) if sample is None]
        for turn in range(max(from_all_ranks(len(lacking)))):
            # A rank that lacks fewer takes part in the others' forwards.
            number = lacking[turn] if turn < len(lacking) else 0
            sample = captured(self._policy, self._head, self._capture, row[number])
            found[number] = sample
            if sample.nbytes <= self._room and id(row[number]) not in self._states:
                self._states[id(row[number])] = sample
                self._room -= sample.nbytes
        packed = pack([one.window(window, random) for one in found if one], window=window)
        return packed.padded(spare) if (spare := spare_rows(packed.states)) else packed

    def _train_step(self, rows: Sequence[Sequence[data.Example]]) -> None:
        """One optimiser step over the rows of all ranks, with a line in the log."""
        started, sums = time.perf_counter(), dict[str, float]()
        self._learner.rate = 1 - self.step / self.steps
        for number in range(self._rank, len(rows), self._world):
            random = np.random.default_rng([self._config.seed, 3, self.step, number])
            result = self._learner.micro_step(self._packed(rows[number], random), self._head)
            means = {"loss": result.loss, "positions": 1.0, **result.terms}
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + mean * result.positions

        of_ranks = from_all_ranks(sums)
        figures = {name: sum(one[name] for one in of_ranks) for name in sums}
        positions = int(figures.pop("positions"))
        self._log(
            "trained",
            **{name: value / max(positions, 1) for name, value in figures.items()},
            positions=positions,
            seconds=round(time.perf_counter() - started, 4),
        )

    def _log(self, kind: str, **figures: Any) -> None:
        """Sends figures of the present step to the parent and, on rank 0, to the log."""
        self._report({"kind": kind, "step": self.step, **figures})
        if self._rank == 0:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, kind: figures}) + "\n")

    def _evaluate(self) -> None:
        """Measures acceptance on the held-out sequences as the gate does, on rank 0, which alone
        has the whole drafter.
        """
        if not self._heldout:
            return
        net, random = self._learner.snapshot(), np.random.default_rng([self._config.seed, 4])
        lengths, found = [len(one) for one in self._heldout], []
        for row in first_fit(lengths, self._config.row_tokens, range(len(lengths))):
            packed = self._packed([self._heldout[i] for i in row], random)
            if self._rank == 0:
                temperature = self._config.temperature or GREEDY
                found.append(
                    chain_survival(net, packed, self._head, DRAFTS, temperature=temperature)
                )

        if found:
            survival = torch.cat(found).mean(dim=0).tolist()
            self._log(
                "heldout",
                length=1.0 + sum(survival),
                survival=survival,
                conditional=list(shift.conditional(survival)),
                positions=sum(map(len, found)),
            )

    def _state(self) -> dict[str, Any]:
        return {"learner": self._learner.state(), "settings": self._settings}

    def _save(self) -> None:
        """Starts a checkpoint of this step."""
        self._writer.write(self._state(), self.step, self._members.writing)
        self._report({"kind": "saved", "step": self.step})

    def _export(self, state: dict[str, Any], directory: Path) -> None:
        """Writes the whole drafter from the shards in `directory` to OUT/checkpoint/speculator."""
        out = self._config.out
        self._learner.export(state, directory, out / ".checkpoint" / "speculator")
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
        (out / ".checkpoint").rename(out / "checkpoint")

    def _resume(self) -> None:
        """Resumes from the newest state in the output directory; without `resume`, removes the
        states. Raises ConfigError for the state of another run.
        """
        if self._config.resume:
            found = checkpoints.find_whole(
                self._config.out / "states", checkpoints.PREFIX, self._members.group
            )
            for fault in found.damaged:
                self._report({"kind": "damaged", "fault": fault})
            if found.checkpoint is not None:
                self._load(found.checkpoint)
        elif self._rank == 0:
            shutil.rmtree(self._config.out / "states", ignore_errors=True)
        self._members.meet()  # no rank reads the states any more
        if self._rank == 0 and self._file.exists():  # lines of later steps are written again
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            # A process that died during a write leaves a line without an end.
            whole = [one for one in lines if one.endswith("\n")]
            kept = [one for one in whole if json.loads(one)["step"] <= self.step]
            self._file.write_text("".join(kept), encoding="utf-8")

    def _load(self, checkpoint: Path) -> None:
        seen = checkpoints.read_state(checkpoint)["settings"]
        for key, own in self._settings.items():
            if seen.get(key) != own:
                hint = " (from --ranks and --batch-tokens)" if key == "rows_per_step" else ""
                raise ConfigError(
                    f"{self._config.out} holds a run with another {key}{hint}; --no-resume or "
                    f"another --out starts afresh",
                    seen=own,
                    allowed=seen.get(key),
                )
        self._learner.load_state(checkpoints.read_checkpoint(checkpoint, self._state())["learner"])
        self._report({"kind": "resumed", "step": self.step})


def rows_of(
    samples: Sequence[data.Example], config: OfflineConfig, epochs: int | None = None
) -> Iterator[list[data.Example]]:
    """Rows of sequences, pass after pass; each pass has its own order. None: endless."""
    lengths = [len(one) for one in samples]
    for epoch in count() if epochs is None else range(epochs):
        order = np.random.default_rng([config.seed, 2, epoch]).permutation(len(lengths)).tolist()
        for row in first_fit(lengths, config.row_tokens, order, open_rows=OPEN_ROWS):
            yield [samples[i] for i in row]


@torch.no_grad()
def captured(
    policy: Any, head: PolicyHead, capture: base.CaptureSpec, example: data.Example
) -> FeatureSample:
    """A sequence with the states of transformers' `policy` and its targets. Collective.

    Sequences are computed one by one, so that the states do not depend on the row, and a resumed
    run has the same.
    """
    token_ids, entering = torch.from_numpy(example.token_ids), dict[int, torch.Tensor]()

    def kept(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    # transformers' own output of hidden states is empty once FSDP2 has wrapped the layers
    hooks = [
        policy.layers[layer].register_forward_pre_hook(kept(layer), with_kwargs=True)
        for layer in capture.inner
    ]
    rows = len(token_ids) - 1
    padded = functional.pad(token_ids[None, :-1], (0, -rows % STEP))  # later tokens change nothing
    last = policy(input_ids=padded, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    states = torch.cat([*(entering[layer] for layer in capture.inner), last], dim=-1)[0, :rows]
    sample = FeatureSample(
        session="",
        step=0,
        policy_version=0,
        lm_head_hash=head.hash,
        hidden=states.bfloat16(),
        token_ids=token_ids,
        generated=torch.from_numpy(example.mask),
        hidden_size=head.lm_head.shape[1],
        layers=capture.layers,
    )
    sample.teach(head)
    return sample


def split(
    samples: Sequence[data.Example], share: float, seed: int
) -> tuple[list[data.Example], list[data.Example]]:
    """(training, held-out) samples; with a share above 0, each list has at least one sample."""
    held = min(max(1, round(share * len(samples))), len(samples) - 1) if share > 0 else 0
    order = np.random.default_rng([seed, 1]).permutation(len(samples))
    return [samples[i] for i in sorted(order[held:])], [samples[i] for i in sorted(order[:held])]


def usable(samples: Sequence[data.Example], limit: int) -> list[data.Example]:
    """The samples cut to `limit` tokens that have a drafting target: a draft needs two tokens
    before it. Raises InvalidInput for fewer than two samples: one for training, one for evaluation.
    """
    shortened = [data.Example(one.token_ids[:limit], one.mask[:limit]) for one in samples]
    kept = [one for one in shortened if one.mask[2:].any()]
    if len(kept) < 2:
        message = "too few sequences with an answer of the model at the third or a later token"
        seen = f"{len(kept)} of {len(samples)}, cut to {limit} tokens"
        raise InvalidInput(message, seen=seen, allowed="at least 2")
    return kept


def train(config: OfflineConfig, report: Report, stopping: Callable[[], bool]) -> bool:
    """Trains the whole run on this rank; returns whether it reached its end. Collective: the ranks
    need a gloo process group.

    Raises ConfigError, InvalidInput, WeightsError or DataLoss for unusable settings or data.
    """
    target, kind = read_config(config.model), trained_net(config.speculator)
    options = kind.read_options(config.options)  # before the data, to reject a wrong one at once
    if config.start is None:
        net = kind.fresh(target, options, config.seed)
    else:
        net = kind.read(config.start, target, options)
    text = cache(lambda: data.ModelText(config.model, target.eos_token_ids))
    samples = data.read_samples(config.data, text, target.vocab_size)
    config.out.mkdir(parents=True, exist_ok=True)
    lm = shards.load_causal_lm(config.model, DTYPES[config.dtype])
    limit = min(config.row_tokens, target.max_position_embeddings)
    kept = usable(samples, limit)
    report({"kind": "data", "sequences": len(kept), "left out": len(samples) - len(kept)})
    choose = getattr(net, "choose_tokens", None)
    if choose is not None and config.start is None:  # a reduced vocabulary
        drafted = np.concatenate([one.token_ids[2:][one.mask[2:]] for one in kept])
        counts = np.bincount(drafted, minlength=target.vocab_size)
        counts[list(target.eos_token_ids)] += len(drafted)
        choose(torch.from_numpy(counts))
    return OfflineRun(config, net, lm, kept, report).run(stopping)


def main() -> None:
    """Reads the settings from the environment, where the parent put them, and trains."""
    link = RankLink.from_environment()
    config, stop = link.config(OfflineConfig), [False]
    signal.signal(signal.SIGTERM, lambda *_: stop.__setitem__(0, True))
    join_ranks("cpu", COLLECTIVE_S, threads=config.threads_per_rank, seed=config.seed)

    def report(message: dict[str, Any]) -> None:
        if link.rank == 0:
            link.send(json.dumps(message).encode())

    link.ready()
    try:
        report({"kind": "done", "whole": train(config, report, lambda: stop[0])})
    except PacelineError as error:
        report({"kind": "error", "text": str(error)})

    link.receive(FAREWELL_S)  # waits until the parent has read the last message
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
