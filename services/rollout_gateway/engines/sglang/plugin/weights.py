"""Checks new weights against the served checkpoint and loads them into SGLang between two rounds.

Every tensor-parallel rank maps the spooled file itself (one page cache on one host), and SGLang's
own loaders shard it. A rank reads its part of the values and checks a share of the file for all
ranks. Before loading, names and shapes are compared with the checkpoint that the engine started
from. SGLang ignores unknown names and dies of wrong shapes. This module owns the serving set.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.errors import WeightsError
from paceline.models import adapters, loading
from paceline.services.rollout_gateway.engines.nouns import Capability, missing
from paceline.services.rollout_gateway.engines.requests.control import PreparedVersions
from paceline.services.rollout_gateway.engines.sglang.plugin import rounded
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.speculators.shift import AcceptanceShift, read_shift
from paceline.training.process import from_all_ranks
from paceline.trajectory import Target, VersionSet

VOCABULARY = ("d2t", "t2d")
"""Tensors that define an EAGLE-3 drafter's vocabulary; SGLang reads them at its start only."""
# the second name is used where the embeddings are tied
HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight")
T = TypeVar("T")
_SELECTORS = {Target.POLICY: "target", Target.DRAFTER: "draft"}


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, read from its file headers, without buffers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in loading.weight_files(directory):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if not loading.is_buffer(name):
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among the tensor-parallel ranks of one SGLang."""

    rank: int = 0
    count: int = 1
    group: Any = None  # a gloo group

    def share(self, names: Collection[str]) -> Collection[str]:
        """The names that this rank checks."""
        return frozenset(sorted(names)[self.rank :: self.count])

    def agree(self, error: WeightsError | None) -> None:
        """Raises, on every rank, the error of the lowest rank that has an error."""
        own = (error.message, error.seen, error.allowed) if error is not None else None
        errors = from_all_ranks(own, self.group) if self.count > 1 else [own]
        for one in errors:
            if one is not None:
                message, seen, allowed = one
                raise WeightsError(message, seen=seen, allowed=allowed) from error


@dataclass(frozen=True, slots=True)
class PreparedTensors:
    """A version that was read and checked."""

    tensors: dict[str, Tensor]
    shift: AcceptanceShift | None
    """Change of acceptance that the drafter's trainer measured."""


ALONE = TensorParallel()


class PluginWeights:
    """Serving set and prepared versions of one rank."""

    def __init__(self, spec: SGLangSpec, ranks: TensorParallel = ALONE) -> None:
        self.ranks = ranks
        self._shared = spec.shared_with_target
        self._start = policy = Path(spec.model_dir)
        self._shapes = {Target.POLICY: checkpoint_shapes(policy)}
        if spec.drafter_dir:
            shapes = checkpoint_shapes(Path(spec.drafter_dir))
            self._shapes[Target.DRAFTER] = self._own(shapes)
            self._vocabulary = read_some(Path(spec.drafter_dir), VOCABULARY)
        self._unloaded: dict[Target, dict[str, Tensor]] = {}
        """Tensors of the serving set that are not on the device yet."""
        self._profile, self._dtype = spec.profile, loading.DTYPES[spec.dtype]
        self.prepared: PreparedVersions[PreparedTensors] = PreparedVersions(spec.profile)
        self.head_hash = loading.hash_head(read_some(policy, HEAD_NAMES))

    @property
    def has_drafter(self) -> bool:
        """True when drafter weights can be swapped."""
        return Target.DRAFTER in self._shapes

    def prepare(self, target: Target, version: int, path: Path) -> None:
        """Read and check a version; all its numbers must be finite in the engine's dtype.

        Raises WeightsError, DataLoss, InvalidInput, or MissingCapability without a drafter. Nothing
        is loaded yet.
        """
        if target not in self._shapes:
            raise missing("sglang", Capability.DRAFTER_UPDATE)
        tensors = dict(adapters.read_version(path, self._start))
        expected = self._shapes[target]
        if target is Target.DRAFTER:
            self._check_vocabulary(tensors)
            tensors = self._own(tensors)
            if "fc.bias" in expected and "fc.bias" not in tensors:
                # SGLang's module has this bias and would keep its old values.
                tensors["fc.bias"] = tensors["fc.weight"].new_zeros(expected["fc.bias"])
        elif "lm_head.weight" not in expected:
            tensors.pop("lm_head.weight", None)  # a copy of tied embeddings is redundant

        wrong = None
        try:
            looked_at = self.ranks.share(expected)
            loading.check_tensors(tensors, expected, looked_at=looked_at, computed_in=self._dtype)
        except WeightsError as error:
            wrong = error
        self.ranks.agree(wrong)
        shift = read_shift(path) if target is Target.DRAFTER else None
        profile = self._profile if target is Target.POLICY else ""
        self.prepared.put(target, version, PreparedTensors(tensors, shift), profile)

    def _own(self, parts: Mapping[str, T]) -> dict[str, T]:
        """The parts of a drafter that neither the target nor the vocabulary defines."""
        left_out = (*self._shared, *VOCABULARY)
        return {name: part for name, part in parts.items() if name not in left_out}

    def _check_vocabulary(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises WeightsError when a drafter's vocabulary differs from the served vocabulary.

        A drafter without these tensors keeps the served vocabulary. A drafter with the target's
        head has the vocabulary of SGLang's own settings, whatever its checkpoint names.
        """
        if "lm_head.weight" in self._shared:
            return
        for name in VOCABULARY:
            given, served = tensors.get(name), self._vocabulary.get(name)
            if given is not None and (served is None or not torch.equal(given, served)):
                message = "the draft vocabulary is fixed for a run"
                raise WeightsError(message, seen=f"another {name}", allowed="the same")

    def commit(self, versions: VersionSet) -> None:
        """Serve a set; `load_committed` then loads its changed parts onto the device.

        Raises the errors of PreparedVersions.changes.
        """
        changes = self.prepared.changes(versions)
        self._unloaded |= {target: new.tensors for target, new in changes.items()}
        if Target.POLICY in changes and self.ranks.rank == 0:  # rank 0 reports the hash
            self.head_hash = loading.hash_head(changes[Target.POLICY].tensors)
        self.prepared.serve(versions)

    def load_committed(self, updater: Any) -> None:
        """Load committed tensors that the device does not hold yet, through SGLang's updater."""
        while self._unloaded:
            target, tensors = self._unloaded.popitem()
            load(updater, _SELECTORS[target], tensors)


def load(updater: Any, selector: str, tensors: Mapping[str, Tensor]) -> None:
    """Begin an update, load tensors and end the update on this rank's runners.

    Raises RuntimeError with SGLang's message. Weights may then be half loaded, so the process must
    end and start again.
    """
    import msgspec
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    _check(updater.begin_weight_update(BeginWeightUpdateReqInput(selector=selector)), "begin")
    try:
        for _, runner in updater._select_runners(selector):
            if rounded.rounds(runner.model):
                rounded.update(runner.model, tensors)
                continue
            update, named = runner.weight_updater.update_weights_from_tensor, [*tensors.items()]
            done, message = update(named_tensors=named)
            if not done:
                raise RuntimeError(f"SGLang refused the tensors: {message}")
        updater._session = msgspec.structs.replace(updater._session, loaded_weights=True)
    finally:
        _check(updater.end_weight_update(EndWeightUpdateReqInput()), "end")


def _check(answer: Any, step: str) -> None:
    if not answer.success:
        raise RuntimeError(f"SGLang refused to {step} a weight update: {answer.message}")


def read_some(directory: Path, wanted: Sequence[str]) -> dict[str, Tensor]:
    """The `wanted` tensors that a checkpoint contains."""
    found: dict[str, Tensor] = {}
    for path in loading.weight_files(directory):
        with safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
            found |= {name: opened.get_tensor(name) for name in wanted if name in names}
    return found
