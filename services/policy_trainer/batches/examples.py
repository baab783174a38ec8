"""Reads the SDK's sequences as a batch with targets of their own, and writes its answer.

Shape letters: N tokens of a sequence, K targets at a token, T targets of all sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.services.policy_trainer.batches.batch import TrainBatch
from paceline.v1.tinker_pb2 import TinkerDatum, TinkerForwardBackwardOutput, TinkerTensor

TARGETS = "target_tokens"
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}


@dataclass(frozen=True, slots=True)
class TargetBatch(TrainBatch):
    """A batch whose targets are not its own next tokens."""

    own_targets: Int[Tensor, " T"]

    @property
    def targets(self) -> Int[Tensor, " T"]:
        """The tokens whose log-probs are computed."""
        return self.own_targets


def read_examples(
    data: Sequence[TinkerDatum], names: Sequence[str], vocabulary: int
) -> tuple[TargetBatch, dict[str, Float[Tensor, " T"]]]:
    """The batch, and the loss's inputs of these names. Absent weights are 1.

    Raises InvalidInput, with the number of the sequence: no token; a token beyond the vocabulary;
    other numbers of targets or inputs than the tokens need; a missing, unknown or non-finite input;
    chunks and tensors that are not served.
    """
    if not data:
        raise InvalidInput("data is empty", allowed="one sequence or more")
    tokens, targets, columns = [], [], {name: list[np.ndarray]() for name in names}
    for number, one in enumerate(data):
        place = f"data[{number}]"
        ids = _tokens(one, place)
        given = {
            name: _values(tensor, f"{place}: {name}") for name, tensor in one.loss_fn_inputs.items()
        }
        wanted = given.pop(TARGETS, None)
        if wanted is None:
            raise InvalidInput(f"{place}: {TARGETS} are missing", seen=sorted(given))
        if not len(ids) or not len(wanted) or len(wanted) % len(ids):
            message = f"{place}: target_tokens do not fit model_input"
            allowed = f"{len(ids)}, or a multiple" if len(ids) else "one token or more"
            raise InvalidInput(message, seen=f"{len(wanted)} targets", allowed=allowed)
        for part in (ids, wanted):
            if not (part.min() >= 0 and part.max() < vocabulary):
                odd = part.min() if part.min() < 0 else part.max()
                message, allowed = "a token is not in the vocabulary", f"0..{vocabulary - 1}"
                raise InvalidInput(f"{place}: {message}", seen=odd, allowed=allowed)
        tokens.append(ids)
        targets.append(wanted)
        for name, values in _inputs(given, names, len(wanted), place).items():
            columns[name].append(values)
    inputs = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    return _batch(tokens, targets), inputs


def _tokens(datum: TinkerDatum, place: str) -> np.ndarray:
    kinds = {chunk.WhichOneof("chunk") for chunk in datum.model_input} - {"encoded_text"}
    if kinds:
        raise InvalidInput(f"{place}: model_input has a chunk", seen=kinds, allowed="tokens")
    data = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    return _numbers(data, _DTYPES[3], f"{place}: model_input")


def _values(tensor: TinkerTensor, place: str) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.WhichOneof("encoding") != "dense":
        seen, allowed = f"type {tensor.dtype}", "dense float32, int64 or int32"
        raise InvalidInput(f"{place} has another form", seen=seen, allowed=allowed)
    return _numbers(tensor.dense, dtype, place)


def _numbers(data: bytes, dtype: str, place: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise InvalidInput(f"{place} ends within a number", seen=f"{len(data)} bytes")
    return np.frombuffer(data, dtype)


def _inputs(
    tensors: Mapping[str, np.ndarray], names: Sequence[str], count: int, place: str
) -> dict[str, np.ndarray]:
    given = {name: values.astype(np.float32) for name, values in tensors.items()}
    if "weights" in names:
        given.setdefault("weights", np.ones(count, np.float32))
    if given.keys() != set(names):
        message = f"{place}: the loss has other inputs"
        seen, allowed = sorted(given), ", ".join((TARGETS, *names))
        raise InvalidInput(message, seen=seen, allowed=allowed)
    for name, values in given.items():
        if len(values) != count:
            message = f"{place}: {name} does not fit target_tokens"
            raise InvalidInput(message, seen=f"{len(values)} values", allowed=count)
        if not np.isfinite(values).all():
            raise InvalidInput(f"{place}: {name} has a value that is not finite", allowed="numbers")
    return given


def _batch(tokens: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> TargetBatch:
    """Each sequence gets a last token that is never read: a trained token has its prediction one
    token before.
    """
    lengths = torch.tensor([len(ids) + 1 for ids in tokens])
    starts = (torch.cumsum(lengths, 0) - lengths).tolist()
    trained, owners = [], []
    for number, (ids, wanted) in enumerate(zip(tokens, targets, strict=True)):
        at = torch.arange(1, len(ids) + 1) + starts[number]
        trained.append(at.repeat_interleave(len(wanted) // len(ids)))
        owners.append(torch.full((len(wanted),), number))
    numbers, flat = torch.arange(len(tokens)), torch.cat(trained)
    padded = [np.append(ids, 0) for ids in tokens]
    nothing = {field.name: torch.zeros(0, dtype=torch.int64) for field in fields(TrainBatch)}
    chosen = {
        "rewards": torch.zeros(len(tokens)),
        "groups": torch.zeros_like(numbers),  # sequences with a common beginning share it
        "sessions": numbers,
        "lengths": lengths,
        "temperatures": torch.ones(len(tokens)),
        "token_ids": torch.from_numpy(np.concatenate(padded).astype(np.int64)),
        "trained": flat,
        "owners": torch.cat(owners),
    }
    own = torch.from_numpy(np.concatenate(targets).astype(np.int64))
    return TargetBatch(**nothing | chosen, own_targets=own)


def write_output(
    data: Sequence[TinkerDatum],
    owners: Int[Tensor, " T"],
    values: Mapping[str, Float[Tensor, " T"]],
) -> TinkerForwardBackwardOutput:
    """The values by name as a record of each sequence, in the shape of its targets. `owners`: the
    sequence of each target.
    """
    output = TinkerForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    wire = {name: one.cpu().numpy().astype("<f4").tobytes() for name, one in values.items()}
    done = 0
    for datum, count in zip(data, owners.bincount().tolist(), strict=True):
        record, size = output.loss_fn_outputs.add(num_datums=1), 4 * count
        for name, numbers in wire.items():
            held = record.fields[name]
            held.data, held.dtype = numbers[done : done + size], 1
            held.offsets = np.array([0, size], "<i8").tobytes()
            held.trailing_shape.extend(datum.loss_fn_inputs[TARGETS].shape[1:])
        done += size
    return output
