"""Runs the Tinker front's orders on a rank: learners, gradients, steps, saved states and pushes."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from google.protobuf import json_format
from torch import Tensor

from paceline.config import OptimizerConfig
from paceline.errors import DataLoss, FailedPrecondition, InvalidInput, NotFound, PacelineError
from paceline.services.policy_trainer import messages, publish
from paceline.services.policy_trainer.algorithms.token_losses import token_loss
from paceline.services.policy_trainer.batches.batch import MicroBatch
from paceline.services.policy_trainer.batches.examples import read_examples, write_output
from paceline.services.policy_trainer.batches.packing import MiniBatch
from paceline.services.policy_trainer.config import Linear
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.policy_trainer.learn.model import StartWeights
from paceline.services.policy_trainer.learn.weights import reshard
from paceline.services.policy_trainer.trainer import PolicyTrainer
from paceline.training import checkpoints, shards
from paceline.v1 import policy_pb2 as pb
from paceline.v1.tinker_pb2 import TinkerForwardBackward

LEARNER_LOST = "LEARNER_LOST"
_PREFIX = "state-"


class Orders:
    """The orders of one rank. All methods are collective; errors are raised on all ranks."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self._folder = Path(trainer.config.run.dir).absolute() / "tinker"
        self._name = ""  # of the learner
        self._config = trainer.config  # of the learner

    def handle(self, command: messages.Learn) -> None:
        """Runs an order and reports its answer or error to the parent."""
        zero = self._trainer.zero
        try:
            answer = self.run(json_format.Parse(command.request, pb.LearnRequest()))
        except PacelineError as error:
            if zero:
                zero.failed(command.command_id, error)
        else:
            if zero:
                text = json_format.MessageToJson(answer)
                zero.send(messages.Learned(command.command_id, text))

    def run(self, request: pb.LearnRequest) -> pb.LearnResponse:
        """The answer to an order.

        Raises FailedPrecondition (LEARNER_LOST) if the ranks hold another learner, InvalidInput for
        an order that can never work, NotFound for an unknown path, DataLoss for damaged files,
        Unavailable if a state cannot be written, and as Publisher.push.
        """
        kind = request.WhichOneof("order")
        if kind is None:
            raise InvalidInput("the request has no order")
        self._trainer.report.begins(f"runs {kind} of {request.learner or 'no learner'}")
        if kind not in ("create", "publish") and request.learner != self._name:
            held, name = self._name or "none", request.learner
            message = "the ranks hold another learner"
            raise FailedPrecondition(message, reason=LEARNER_LOST, seen=held, allowed=name)
        answer: pb.LearnResponse = getattr(self, f"_{kind}")(request)
        return answer

    # --- learners ---------------------------------------------------------------------------------

    def _create(self, request: pb.LearnRequest) -> pb.LearnResponse:
        """Holds a learner. It is built anew unless the present one has the same adapters and a
        saved state replaces its numbers.
        """
        order = request.create
        saved = self._found(order.path) if order.path else None
        rank, targets, seed = order.rank, list(order.targets), order.seed
        if saved is not None:
            facts = checkpoints.read_state(saved)["served"]
            rank, targets, seed = facts["rank"], facts["targets"], facts["seed"]
        base = self._trainer.config
        targets = targets or list(base.adapters.targets)
        if odd := sorted(set(targets) - set(get_args(Linear))):
            raise InvalidInput("no such layers", seen=odd, allowed=", ".join(get_args(Linear)))
        adapters = base.adapters.model_copy(update={"rank": rank, "targets": tuple(targets)})
        run = base.run.model_copy(update={"seed": seed})
        config = base.model_copy(update={"adapters": adapters, "run": run})
        self._name = ""
        if saved is None or adapters != self._config.adapters:
            self._build(config)
        self._config = config
        self._trainer.learner.memory.enter()
        if saved is not None:
            self._read(saved, optimizer=order.optimizer)
        self._name = request.learner
        return pb.LearnResponse(rank=rank, targets=targets)

    def _build(self, config: Any) -> None:
        trainer = self._trainer
        mesh = trainer.learner.mesh
        del trainer.learner
        gc.collect()  # two learners may not fit
        report = trainer.report.goes_on
        trainer.adopt(build_learner(config, mesh, lambda read, of: report("loads the model")))

    def _read(self, saved: Path, *, optimizer: bool) -> None:
        learner = self._trainer.learner
        state = checkpoints.read_checkpoint(saved, {"learner": learner.state()})["learner"]
        if not optimizer:
            for name, tensor in shards.tensors_of(state):
                if name.startswith("optimizer/"):
                    shards.local_of(tensor).zero_()
            state["updates"] = 0
        learner.optimizer.forget()
        reshard(learner.model)
        try:
            learner.load_state(state)
        except KeyError as error:
            raise DataLoss(f"{saved} misses a tensor", seen=error.args[0]) from error

    def _found(self, path: str) -> Path:
        """The newest whole checkpoint of a directory."""
        found = checkpoints.find_whole(self._directory(path), _PREFIX, dist.group.WORLD)
        if found.checkpoint is None:
            raise NotFound("nothing is saved there", seen=path)
        return found.checkpoint

    def _directory(self, path: str) -> Path:
        directory = (self._folder / path).resolve()
        if not directory.is_relative_to(self._folder.resolve()):
            raise InvalidInput("the path leaves the folder of saved states", seen=path)
        return directory

    # --- training ---------------------------------------------------------------------------------

    def _forward_backward(self, request: pb.LearnRequest) -> pb.LearnResponse:
        """Log-probs and losses of all targets, at temperature 1."""
        order = request.forward_backward
        loss, learner = token_loss(order.loss_fn), self._trainer.learner
        options = loss.chosen(_options(order))
        vocabulary = learner.model.config.vocab_size
        batch, inputs = read_examples(order.data, loss.inputs, vocabulary)
        device = learner.mesh.device_type
        logprobs, losses = (torch.zeros(len(batch.owners), device=device) for _ in range(2))

        def losses_of(micro: MicroBatch) -> Tensor:
            at = micro.tokens.cpu()
            policy, _ = learner.model(micro)
            own = {name: values[at].to(device) for name, values in inputs.items()}
            found = loss.function(policy, own, options)
            logprobs[micro.tokens], losses[micro.tokens] = policy.detach(), found.detach()
            return found

        everything = torch.ones(len(batch.rewards), dtype=torch.bool)
        if order.forward_only:
            with torch.no_grad():
                for micro in learner.packer.micro_batches(batch, everything):
                    losses_of(micro)
            reshard(learner.model)
        else:
            part = MiniBatch(everything, torch.ones(len(batch.owners)))
            learner.packer.accumulate(learner.model, batch, part, losses_of, learner.on_micro_batch)
        for one in (logprobs, losses):
            dist.all_reduce(one)
        found = {"logprobs": logprobs, "elementwise_loss": losses}
        output = write_output(order.data, batch.owners, found)
        output.metrics["loss:sum"] = float(losses.double().sum())
        return pb.LearnResponse(output=output)

    def _optim_step(self, request: pb.LearnRequest) -> pb.LearnResponse:
        order = request.optim_step
        learner = self._trainer.learner
        settings = OptimizerConfig.model_construct(
            lr=order.learning_rate,
            betas=(order.beta1, order.beta2),
            weight_decay=order.weight_decay,
            clip_norm=order.clip_norm or math.inf,
            warmup_steps=0,
        )
        learner.optimizer.configure(settings, order.eps)
        norm = learner.optimizer.step(learner.updates + 1)
        if not math.isfinite(norm):
            message = "the gradient is not finite; it is dropped and the weights stay"
            raise InvalidInput(message, reason="NOT_FINITE", seen=norm)
        learner.updates += 1
        return pb.LearnResponse(figures={"grad_norm": norm, "step": learner.updates})

    # --- weights ----------------------------------------------------------------------------------

    def _save(self, request: pb.LearnRequest) -> pb.LearnResponse:
        order = request.save
        trainer, adapters = self._trainer, self._config.adapters
        state = trainer.learner.state()
        if order.weights_only:
            state = {name: one for name, one in state.items() if name.startswith("model/")}
        export = trainer.export if order.weights_only else lambda state, checkpoint: None
        served = {
            "rank": adapters.rank,
            "targets": list(adapters.targets),
            "seed": self._config.run.seed,
        }
        writer = checkpoints.CheckpointWriter(self._directory(order.path), export, prefix=_PREFIX)
        dist.barrier()  # rank 0 has removed what an earlier write has left behind
        writer.write({"learner": state, "served": served}, order.number, trainer.writing)
        writer.wait(trainer.report.goes_on)
        return pb.LearnResponse()

    def _publish(self, request: pb.LearnRequest) -> pb.LearnResponse:
        """Pushes saved weights, which may be of another learner."""
        order = request.publish
        trainer = self._trainer
        weights, mesh = trainer.learner.weights, trainer.learner.mesh
        saved = self._found(order.path) if order.path else Path(trainer.config.model)
        start, shapes = StartWeights(saved), weights.shapes()

        def rows() -> Iterator[tuple[str, Tensor]]:
            for name, one in weights.whole.items():
                local = shards.local_rows(start.read(name, one.shape), one)
                yield name, checkpoints.sharded_like(one, local.to(mesh.device_type), mesh)

        publication = publish.publication_of(
            order.policy_version, rows(), shapes, trainer.config, trainer.publisher.forget
        )
        report = trainer.publisher.push(publication, request.context)
        return pb.LearnResponse(figures={"bytes": report.bytes, "push_s": report.push_s})


def _options(order: TinkerForwardBackward) -> dict[str, float]:
    given = order.loss_fn_config_v2
    if texts := [name for name, one in given.items() if one.WhichOneof("value") != "number"]:
        raise InvalidInput("loss_fn_config has a text", seen=texts, allowed="numbers")
    return {**order.loss_fn_config, **{name: one.number for name, one in given.items()}}
