"""Reads the sequences of the Tinker front as a batch with targets of their own.

Shape letters: N tokens of a sequence, K targets at a token, T targets of all sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.services.policy_trainer.batches.batch import TrainBatch
from paceline.v1.policy_pb2 import LearnExample


@dataclass(frozen=True, slots=True)
class TargetBatch(TrainBatch):
    """A batch whose targets are not its own next tokens."""

    own_targets: Int[Tensor, " T"]

    @property
    def targets(self) -> Int[Tensor, " T"]:
        """The tokens whose log-probs are computed."""
        return self.own_targets


def read_examples(
    examples: Sequence[LearnExample], names: Sequence[str], vocabulary: int
) -> tuple[TargetBatch, dict[str, Float[Tensor, " T"]]]:
    """The batch, and the loss's inputs of these names. Absent weights are 1.

    Raises InvalidInput, with the number of the sequence: no token; a token beyond the vocabulary;
    other numbers of targets or inputs than the tokens need; a missing, unknown or non-finite input.
    """
    tokens, targets, columns = [], [], {name: list[np.ndarray]() for name in names}
    for number, one in enumerate(examples):
        ids, wanted = (np.frombuffer(part, "<i4") for part in (one.tokens, one.targets))
        place = f"data[{number}]"
        if not len(ids) or not len(wanted) or len(wanted) % len(ids):
            message = f"{place}: target_tokens do not fit model_input"
            allowed = f"{len(ids)}, or a multiple" if len(ids) else "one token or more"
            raise InvalidInput(message, seen=f"{len(wanted)} targets", allowed=allowed)
        for part in (ids, wanted):
            if part.min() < 0 or part.max() >= vocabulary:
                odd = int(part.min()) if part.min() < 0 else int(part.max())
                message, allowed = (
                    f"{place}: a token is not in the vocabulary",
                    f"0..{vocabulary - 1}",
                )
                raise InvalidInput(message, seen=odd, allowed=allowed)
        tokens.append(ids)
        targets.append(wanted)
        for name, values in _inputs(one, names, len(wanted), place).items():
            columns[name].append(values)
    inputs = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    return _batch(tokens, targets), inputs


def _inputs(
    example: LearnExample, names: Sequence[str], count: int, place: str
) -> dict[str, np.ndarray]:
    given = {name: np.frombuffer(data, "<f4") for name, data in example.inputs.items()}
    if "weights" in names:
        given.setdefault("weights", np.ones(count, np.float32))
    if given.keys() != set(names):
        message = f"{place}: the loss has other inputs"
        seen, allowed = sorted(given), ", ".join(("target_tokens", *names))
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
