"""Takes optimiser steps on batches and measures them."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import DataLoss
from paceline.services.policy_trainer.algorithms import base, build_algorithm
from paceline.services.policy_trainer.algorithms.losses import divergence
from paceline.services.policy_trainer.batches import packing
from paceline.services.policy_trainer.batches.batch import MicroBatch, TrainBatch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn import weights
from paceline.services.policy_trainer.learn.model import PolicyModel, ValueModel, pair_cost
from paceline.services.policy_trainer.learn.objective import Critic, Figures, policy_losses
from paceline.services.policy_trainer.messages import StepFacts
from paceline.telemetry import names, span
from paceline.training.optimizer import NamedOptimizer


@dataclass(frozen=True, slots=True)
class StepStart:
    """Values of each trained token before the updates (T of the batch, on the CPU)."""

    proximal_logprobs: Float[Tensor, " T"] | None  # None: the single update's own, detached
    reference_logprobs: Float[Tensor, " T"]  # 0 without a reference
    values: Float[Tensor, " T"]  # 0 without a critic
    advantages: Float[Tensor, " T"]


class Learner:
    """Models and optimisers of this rank. All methods are collective."""

    def __init__(
        self,
        config: PolicyTrainerConfig,
        model: PolicyModel,
        mesh: DeviceMesh,
        reference: nn.Module | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.mesh = mesh
        self.reference = reference
        self.critic = critic
        self.algorithm: base.Algorithm = build_algorithm(config.algorithm)
        self.packer = packing.Packer(config, mesh, pair_cost(model))
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of this step, by part
        self.updates = 0
        self.on_micro_batch: Callable[[int, int], None] = lambda number, of: None
        """Called with each micro-batch of this rank before it is trained on."""
        self.on_layer: Callable[[], None] = lambda: None
        """Called as each layer of a model is computed, forward and backward."""
        every = (model, reference, critic.model if critic else None)
        models = [one for one in every if one is not None]
        for one in models:
            for layer in one.layers() if isinstance(one, PolicyModel | ValueModel) else ():
                layer.register_forward_hook(self._note_layer)
        self.weights = weights.PolicyWeights(config, model)
        audited = config.audit.kept_versions if config.audit.share else 0
        versions = min(audited, config.max_staleness or 0)
        self.kept = weights.KeptWeights(model, self.weights.trained, versions)
        settings = config.optimizer
        self.optimizer = NamedOptimizer(self.weights.trained, settings, moments=settings.moments)
        optimizers = [self.optimizer, *([critic.optimizer] if critic else ())]
        self.memory = weights.DeviceMemory(models, optimizers)

    def _note_layer(self, layer: nn.Module, given: Any, made: Any) -> None:
        self.on_layer()
        states = made[0] if isinstance(made, tuple) else made
        if states.requires_grad:
            states.register_hook(lambda gradient: self.on_layer())

    def step(self, batch: TrainBatch, steps_before: int = 0) -> StepFacts:
        """Updates the weights on the batch, once per mini-batch and pass. Without a token that
        carries gradient, the weights stay.

        If loss or gradient is not finite, no rank takes the update. `steps_before`: RL steps
        already trained.
        """
        started = time.perf_counter()
        self._seconds.clear()
        figures = Figures()
        if self.kept.limit:
            with self._part("audit"):
                self._audit_earlier(batch, figures)
                self.kept.keep()
        known, returns = self._know(batch, figures)
        if self.critic is not None and steps_before < self.critic.warmup_steps:
            known = replace(known, advantages=torch.zeros_like(known.advantages))
        losses, norms = [], []
        for _ in range(self.config.algorithm.passes):
            for part in packing.mini_batches(batch, self.config):
                loss, norm = self._update(batch, part, known, figures)
                losses.append(loss)
                norms.append(norm)
                if self.critic is not None:
                    with self._part("critic"):
                        old = known.values
                        norms.append(self.critic.update(batch, part, old, returns, figures))

        means = {"loss": _mean(losses), "grad_norm": _mean(norms[:1])}
        finite = {name: value for name, value in means.items() if value is not None}
        reduced, cells = figures.reduced()
        return StepFacts(
            figures={**reduced, **finite, **self._seconds},
            train_s=time.perf_counter() - started,
            world_size=self.mesh.size(),
            skipped_updates=sum(not math.isfinite(norm) for norm in norms),
            cells=cells,
        )

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Attributes the seconds of the block to that part of the step; rank 0 also records a span.
        On CUDA, work may finish in a later part, at the latest in the optimiser, which waits for
        the gradient's norm.
        """
        started = time.perf_counter()
        with span(names.policy_part(name)) if dist.get_rank() == 0 else nullcontext():
            yield
        self._seconds[f"seconds/{name}"] += time.perf_counter() - started

    # --- before the updates -----------------------------------------------------------------------

    def _know(self, batch: TrainBatch, figures: Figures) -> tuple[StepStart, Float[Tensor, " T"]]:
        """Runs the passes without gradient. Returns their values with advantages, and returns for
        the critic.
        """
        needs = self.algorithm.needs()
        nothing = torch.zeros(len(batch.owners))
        proximal, reference, values = None, nothing, nothing
        if needs.proximal:
            with self._part("proximal_logprobs"):
                proximal = self._look(batch, self.model, figures)
        if self.reference:
            with self._part("reference_logprobs"):
                reference = self._look(batch, self.reference)
        if self.critic:
            with self._part("values"):
                values = self._look(batch, self.critic.model)
        penalties = nothing
        kl = self.config.algorithm.kl
        if kl.coefficient and kl.place == "reward" and proximal is not None:
            penalties = kl.coefficient * divergence(proximal, reference, kl.estimator)
        sessions = base.SessionBatch(
            batch.rewards, batch.groups, batch.weights, batch.owners, penalties, values
        )
        advantages = self.algorithm.advantages(sessions)
        returns = nothing
        if self.critic:
            returns = values + cast(base.ValueAlgorithm, self.algorithm).estimates(sessions)
        return StepStart(proximal, reference, values, advantages), returns

    @torch.no_grad()
    def _look(
        self, batch: TrainBatch, model: nn.Module, figures: Figures | None = None
    ) -> Float[Tensor, " T"]:
        """A model's output for every trained token, on all ranks; measured if `figures`
        is given.
        """
        found = torch.zeros(len(batch.owners), device=self.mesh.device_type)
        everything = torch.ones(len(batch.rewards), dtype=torch.bool)
        for micro in self.packer.micro_batches(batch, everything):
            output = model(micro)
            if isinstance(output, tuple):
                output, entropy = output
                if figures is not None:
                    self._measure(batch, micro, output, entropy, figures)
            found[micro.tokens] = output
        dist.all_reduce(found)
        return found.cpu()

    # --- one update -------------------------------------------------------------------------------

    def _update(
        self, batch: TrainBatch, part: packing.MiniBatch, known: StepStart, figures: Figures
    ) -> tuple[float, float]:
        """Loss and gradient norm before clipping. The norm is NaN if the loss is not finite. Both
        are 0 if nothing carries gradient.
        """
        moving = self._moving(batch, known.advantages)
        if known.proximal_logprobs is None:
            self._measure_still(batch, part.members & ~moving, figures)
        if not (moving & part.members)[batch.owners].any():
            return 0.0, 0.0
        moved = replace(part, members=part.members & moving)
        with self._part("forward_backward"):
            loss = self._accumulate(batch, moved, known, figures)
        with self._part("optimizer"):
            return loss, self._move(loss)

    def _moving(self, batch: TrainBatch, advantages: Float[Tensor, " T"]) -> Bool[Tensor, " B"]:
        """Trajectories with tokens that carry gradient."""
        settings = self.config.algorithm
        if settings.kl.in_loss or settings.entropy_coefficient:
            return torch.ones(len(batch.rewards), dtype=torch.bool)
        moved = (advantages != 0).float()
        return torch.zeros(len(batch.rewards)).index_add_(0, batch.owners, moved) > 0

    @torch.no_grad()
    def _measure_still(
        self, batch: TrainBatch, still: Bool[Tensor, " B"], figures: Figures
    ) -> None:
        for micro in self.packer.micro_batches(batch, still):
            policy, entropy = self.model(micro)
            self._measure(batch, micro, policy, entropy, figures)

    def _accumulate(
        self, batch: TrainBatch, part: packing.MiniBatch, known: StepStart, figures: Figures
    ) -> float:
        """Accumulates gradients of the mini-batch's loss; returns that loss, equal on all ranks."""
        settings = self.config.algorithm
        rewarded = settings.entropy_coefficient > 0

        def losses_of(micro: MicroBatch) -> Tensor:
            policy, entropy = self.model(micro, entropy_gradient=rewarded)
            if known.proximal_logprobs is None:
                self._measure(batch, micro, policy, entropy, figures)
            tokens = self._token_batch(batch, micro, known, policy)
            losses, metrics = policy_losses(settings, self.algorithm, tokens, entropy)
            figures.add(metrics)
            return losses

        self.optimizer.forget()
        return self.packer.accumulate(self.model, batch, part, losses_of, self.on_micro_batch)

    def _move(self, loss: float) -> float:
        """Clips by the global norm and steps. Returns the norm before clipping, NaN if the loss
        over all ranks is not finite. With a loss or norm that is not finite, no step is taken.
        """
        if not math.isfinite(loss):
            return math.nan
        norm = self.optimizer.step(self.updates + 1)
        self.updates += math.isfinite(norm)
        return norm

    def _token_batch(
        self, batch: TrainBatch, micro: MicroBatch, known: StepStart, policy: Float[Tensor, " M"]
    ) -> base.TokenBatch:
        at, device = micro.tokens.cpu(), policy.device
        proximal, behavior = known.proximal_logprobs, batch.behavior_logprobs[at].to(device)
        start = policy.detach() if proximal is None else proximal[at].to(device)
        return base.TokenBatch(
            policy_logprobs=policy,
            proximal_logprobs=behavior if self.config.algorithm.correction.bypass else start,
            behavior_logprobs=behavior,
            reference_logprobs=known.reference_logprobs[at].to(device),
            advantages=known.advantages[at].to(device),
            values=known.values[at].to(device),
            sequences=micro.sequences,
            positions=micro.positions,
            lags=batch.lags[at].to(device),
        )

    def _measure(
        self,
        batch: TrainBatch,
        micro: MicroBatch,
        start: Float[Tensor, " M"],
        entropy: Float[Tensor, " M"],
        figures: Figures,
    ) -> None:
        """Records entropy and mismatch of tokens, each once per step."""
        at = micro.tokens.cpu()
        gaps = start.detach().cpu() - batch.behavior_logprobs[at]
        figures.add({"entropy": entropy.detach()})
        figures.add_mismatch(gaps, batch.lags[at], batch.masks_by_way(at))
        figures.add_audit(gaps, batch.masks_by_cell(at, lag=0))

    @torch.no_grad()
    def _audit_earlier(self, batch: TrainBatch, figures: Figures) -> None:
        """Scores audited tokens of earlier versions with these versions, if they are kept."""
        for lag in range(1, self.kept.versions + 1):
            drew = batch.audited[batch.owners] & (batch.lags == lag)
            if not drew.any():
                continue
            members = torch.zeros_like(batch.audited).index_fill_(0, batch.owners[drew], True)
            with self.kept.as_of(lag):
                for micro in self.packer.micro_batches(batch, members):
                    logprobs, _ = self.model(micro)
                    at = micro.tokens.cpu()
                    gaps = logprobs.cpu() - batch.behavior_logprobs[at]
                    figures.add_audit(gaps, batch.masks_by_cell(at, lag))

    # --- the whole weights ------------------------------------------------------------------------

    def state(self, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Copies of this rank's shards on the CPU: "model" and "optimizer" by trained parameter.

        `into`: an earlier state, which is overwritten.
        """
        on_cpu = self.mesh.device_type == "cpu"
        mesh = self.mesh if on_cpu else DeviceMesh.from_group(self.mesh.get_group(), "cpu")
        old = into["critic"] if into and self.critic else None
        numbers = self.memory.numbers
        critic = {"critic": self.critic.state(mesh, old, numbers)} if self.critic else {}
        scale = {"adapter_scale": self.config.adapters.scale} if self.weights.adapted else {}
        own = self.optimizer.state(mesh, into, numbers)
        return {**own, "updates": self.updates, **critic, **scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state` of the same number of ranks.

        Raises KeyError or DataLoss for a state of other adapters.
        """
        if self.weights.adapted and state["adapter_scale"] != self.config.adapters.scale:
            seen, allowed = state["adapter_scale"], self.config.adapters.scale
            raise DataLoss("adapters of another alpha / rank", seen=seen, allowed=allowed)
        self.optimizer.load_state(state)
        self.updates = state["updates"]
        if self.critic:
            self.critic.load_state(state["critic"])


def _mean(values: Sequence[float]) -> float | None:
    """Mean of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None
