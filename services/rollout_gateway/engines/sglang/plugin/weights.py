"""New weights inside SGLang: checked against the served checkpoint, loaded between two rounds. Owns
the serving set.

Every tensor-parallel rank maps the spooled file itself (one page cache on one host) and SGLang's
own loaders shard it: of the numbers a rank reads its part, and a share of the whole that it looks
at for all. Names and shapes are compared with those of the checkpoint the engine was
started from before anything is loaded, because SGLang ignores unknown names and dies of wrong
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.errors import WeightsError
from paceline.models.adapters import read_version
from paceline.models.loading import check_tensors, hash_head, is_buffer, weight_files
from paceline.services.rollout_gateway.engines.nouns import Capability, missing
from paceline.services.rollout_gateway.engines.requests.versions import PreparedVersions
from paceline.services.rollout_gateway.engines.sglang.plugin import rounded
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.speculators.shift import AcceptanceShift, read_shift
from paceline.training.process import from_all_ranks
from paceline.trajectory import Target, VersionSet

VOCABULARY = ("d2t", "t2d")
"""Which tokens an EAGLE-3 drafter speaks of; SGLang reads them at its start only."""
# the second where the embeddings are tied
HEAD_NAMES = (
    "lm_head.weight",
    "model.embed_tokens.weight",
)
_SELECTORS = {Target.POLICY: "target", Target.DRAFTER: "draft"}


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint without known buffers, from the headers of its files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if not is_buffer(name):
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor-parallel ranks of one SGLang, of which this process is one."""

    rank: int = 0
    count: int = 1
    group: Any = None  # of gloo

    def share(self, names: Collection[str]) -> Collection[str]:
        """Those of the names that this rank looks at."""
        return frozenset(sorted(names)[self.rank :: self.count])

    def agree(self, error: WeightsError | None) -> None:
        """Raises on every rank the error of the lowest one that has any."""
        own = (error.message, error.seen, error.allowed) if error is not None else None
        told = from_all_ranks(own, self.group) if self.count > 1 else [own]
        for one in told:
            if one is not None:
                message, seen, allowed = one
                raise WeightsError(message, seen=seen, allowed=allowed) from error


@dataclass(frozen=True, slots=True)
class PreparedTensors:
    """A version that was read and checked."""

    tensors: dict[str, Tensor]
    shift: AcceptanceShift | None
    """What a drafter's trainer says of its drafts."""


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
            left_out = (*self._shared, *VOCABULARY)
            self._shapes[Target.DRAFTER] = {
                name: shape for name, shape in shapes.items() if name not in left_out
            }
            self._vocabulary = read_some(Path(spec.drafter_dir), VOCABULARY)
        self._unloaded: dict[Target, dict[str, Tensor]] = {}
        """Tensors of the serving set that the device does not hold yet."""
        self._profile = spec.profile
        self.prepared: PreparedVersions[PreparedTensors] = PreparedVersions(spec.profile)
        self.head_hash = hash_head(head_of(read_some(policy, HEAD_NAMES)))

    @property
    def has_drafter(self) -> bool:
        """True when drafter weights can be swapped."""
        return Target.DRAFTER in self._shapes

    def prepare(
        self,
        target: Target,
        version: int,
        path: Path,
        tried: Callable[[Target, Mapping[str, Tensor]], None] = lambda _target, _tensors: None,
    ) -> None:
        """Read and check a version; `tried` refuses what SGLang would make of it.

        Raises WeightsError, DataLoss or InvalidInput; nothing is loaded yet.
        """
        if target not in self._shapes:
            raise missing("sglang", Capability.DRAFTER_UPDATE)
        tensors = dict(read_version(path, self._start))
        expected = self._shapes[target]
        if target is Target.DRAFTER:
            self._check_vocabulary(tensors)
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if name not in (*self._shared, *VOCABULARY)
            }
            if "fc.bias" in expected and "fc.bias" not in tensors:
                # SGLang's module has one and would keep the old values.
                tensors["fc.bias"] = tensors["fc.weight"].new_zeros(expected["fc.bias"])
        elif "lm_head.weight" not in expected:
            tensors.pop("lm_head.weight", None)  # a tied copy carries nothing

        wrong = None
        try:
            check_tensors(tensors, expected, looked_at=self.ranks.share(expected))
        except WeightsError as error:
            wrong = error
        self.ranks.agree(wrong)
        tried(target, tensors)
        shift = read_shift(path) if target is Target.DRAFTER else None
        profile = self._profile if target is Target.POLICY else ""
        self.prepared.put(target, version, PreparedTensors(tensors, shift), profile)

    def _check_vocabulary(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises WeightsError when a drafter's tokens are other ones; a drafter that names none
        keeps them.
        """
        for name in VOCABULARY:
            given, served = tensors.get(name), self._vocabulary.get(name)
            if given is not None and (served is None or not torch.equal(given, served)):
                raise WeightsError(
                    "the draft vocabulary is fixed for a run",
                    seen=f"another {name}",
                    allowed="the same",
                )

    def commit(self, versions: VersionSet) -> None:
        """Serve a set, whose changed parts `load_committed` brings to the device; raises what
        PreparedVersions.changes does.
        """
        changes = self.prepared.changes(versions)
        self._unloaded |= {target: new.tensors for target, new in changes.items()}
        if Target.POLICY in changes and self.ranks.rank == 0:  # who tells it
            self.head_hash = hash_head(head_of(changes[Target.POLICY].tensors))
        self.prepared.serve(versions)

    def load_committed(self, updater: Any) -> None:
        """Load through SGLang's updater what was committed and is not on the device."""
        while self._unloaded:
            target, tensors = self._unloaded.popitem()
            load(updater, _SELECTORS[target], tensors)


def check_rounding(
    updater: Any, target: Target, tensors: Mapping[str, Tensor], ranks: TensorParallel = ALONE
) -> None:
    """Raises WeightsError where a version is not finite once SGLang has rounded it, on every rank
    where it is so on one.
    """
    models = [one.model for _, one in updater._select_runners(_SELECTORS[target])]
    models = [model for model in models if rounded.rounds(model)]
    if not models:
        return
    wrong = None
    for one in filter(None, (rounded.not_finite(model, tensors) for model in models)):
        said = f"{one.place}: {one.numbers} are not finite after rounding"
        wrong = WeightsError(said, seen=one.value, allowed="finite")
    ranks.agree(wrong)


def load(updater: Any, selector: str, tensors: Mapping[str, Tensor]) -> None:
    """begin, load and end on this rank's runners.

    Raises RuntimeError with what SGLang says: weights may be half loaded, so the process has to end
    and start again.
    """
    import msgspec
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    _check(updater.begin_weight_update(BeginWeightUpdateReqInput(selector=selector)), "begin")
    try:
        for _, runner in updater._select_runners(selector):
            if rounded.rounds(runner.model):
                rounded.update(runner.model, tensors)
                continue
            done, message = runner.weight_updater.update_weights_from_tensor(
                named_tensors=list(tensors.items())
            )
            if not done:
                raise RuntimeError(f"SGLang refused the tensors: {message}")
        updater._session = msgspec.structs.replace(updater._session, loaded_weights=True)
    finally:
        _check(updater.end_weight_update(EndWeightUpdateReqInput()), "end")


def _check(answer: Any, step: str) -> None:
    if not answer.success:
        raise RuntimeError(f"SGLang refused to {step} a weight update: {answer.message}")


def read_some(directory: Path, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Those of the `wanted` tensors that a checkpoint has."""
    found: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
            found |= {name: opened.get_tensor(name) for name in wanted if name in names}
    return found


def head_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The head; the embedding where they are tied. Raises WeightsError when there is neither."""
    for name in HEAD_NAMES:
        if name in tensors:
            return tensors[name]
    raise WeightsError(
        "no language-model head among the tensors", seen=sorted(tensors)[:4], allowed=HEAD_NAMES
    )
