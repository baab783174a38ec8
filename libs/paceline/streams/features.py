"""Encodes the hidden rows of one finished request as a stream entry, and decodes them.

Row i is the target's state at the token of absolute position positions[i]. token_ids[i] is that
token, token_ids[i + 1] the next one. The state of the last token is absent: a request of N tokens
has T = N - 1 rows and T + 1 token ids.

A batch may also hold rows of verified and rejected drafts, in tensors of their own. An older reader
skips these tensors, and a batch without them has the older form, so both have one schema version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import FEATURES, PayloadTensor
from paceline.telemetry import inject
from paceline.tensors import (
    NUMPY_CODES,
    NamedTensor,
    as_numpy,
    decode_safetensors,
    encode_safetensors,
    from_numpy,
)

FEATURE_DTYPES = ("BF16", "F32")
_REJECTED = "rejected_"


@dataclass(frozen=True, slots=True, eq=False)
class RejectedRows:
    """States at drafts that the target verified and rejected: R rows beside the T rows of the
    sequence.

    Row i is the state at token_ids[i], after the tokens on the path of its parents. The target's
    distribution of the token after the draft is softmax(lm_head(hidden[i])). The probability of the
    draft itself follows in the same way from its parent's row. Head and policy version are those of
    the sequence's row at the root of the drafts.
    """

    hidden: NamedTensor = field(repr=False)  # [R, H] with the sequence's dtype
    token_ids: npt.NDArray[np.int32] = field(repr=False)  # [R]
    positions: npt.NDArray[np.int32] = field(repr=False)  # [R] one more than the parent's position
    # [R] i < T: row i of the sequence; T + j: earlier rejected row j
    parents: npt.NDArray[np.int32] = field(repr=False)

    @property
    def rows(self) -> int:
        """Number of rejected rows, R."""
        return self.hidden.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBatch:
    """Rows of one request: T rows, H hidden size."""

    run_id: str
    step: int
    session_id: str
    policy_version: int  # policy version of the last row
    lm_head_hash: str  # head of the last row's version
    hidden: NamedTensor = field(repr=False)  # [T, H] BF16 or F32
    token_ids: npt.NDArray[np.int32] = field(repr=False)  # [T + 1]
    positions: npt.NDArray[np.int32] = field(repr=False)  # [T]
    mask: npt.NDArray[np.uint8] = field(repr=False)  # [T] 1 for a generated token
    versions: npt.NDArray[np.int64] = field(repr=False)  # [T] policy version that computed the row
    layers: str = "last"
    convention: str = "post_norm"  # the final norm has been applied
    group_id: str = ""
    temperature: float = 1.0
    traceparent: str = ""
    rejected: RejectedRows | None = None

    def __post_init__(self) -> None:
        if self.hidden.dtype not in FEATURE_DTYPES or len(self.hidden.shape) != 2:
            seen = (self.hidden.dtype, self.hidden.shape)
            raise InvalidInput(
                "hidden rows have another form", seen=seen, allowed=f"[T, H] of {FEATURE_DTYPES}"
            )

        rows = self.rows
        lengths = tuple(
            array.shape for array in (self.token_ids, self.positions, self.mask, self.versions)
        )
        if lengths != ((rows + 1,), (rows,), (rows,), (rows,)):
            raise InvalidInput(
                "arrays of a feature batch do not fit its rows",
                seen=lengths,
                allowed=f"{rows} rows",
            )

        if self.rejected is not None:
            self._check_rejected(self.rejected)

    def _check_rejected(self, rejected: RejectedRows) -> None:
        """Raises InvalidInput unless each rejected row follows its parent, one position later."""
        form = (rejected.hidden.dtype, rejected.hidden.shape[1:])
        if form != (self.hidden.dtype, (self.hidden_size,)):
            raise InvalidInput(
                "rejected rows have another form",
                seen=form,
                allowed=(self.hidden.dtype, self.hidden_size),
            )

        lengths = {
            array.shape for array in (rejected.token_ids, rejected.positions, rejected.parents)
        }
        if lengths != {(rejected.rows,)}:
            raise InvalidInput(
                "arrays of rejected rows do not fit", seen=lengths, allowed=f"{rejected.rows} rows"
            )

        if (rejected.parents < 0).any() or (
            rejected.parents >= self.rows + np.arange(rejected.rows)
        ).any():
            raise InvalidInput(
                "a rejected row's parent does not stand before it", seen=rejected.parents.tolist()
            )

        positions = np.concatenate((self.positions, rejected.positions)).astype(np.int64)
        if (positions[rejected.parents] + 1 != rejected.positions).any():
            raise InvalidInput(
                "a rejected row does not follow its parent", seen=rejected.positions.tolist()
            )

    @property
    def rows(self) -> int:
        """Number of sequence rows, T."""
        return self.hidden.shape[0]

    @property
    def all_rows(self) -> int:
        """Number of rows including rejected drafts."""
        return self.rows + (self.rejected.rows if self.rejected is not None else 0)

    @property
    def hidden_size(self) -> int:
        """Hidden size, H."""
        return self.hidden.shape[1]


def encode_features(batch: FeatureBatch) -> tuple[dict[str, str], bytes]:
    """Header and payload of one request's rows. The traceparent defaults to the current span's."""
    header = FEATURES.write_header(
        batch,
        dtype=batch.hidden.dtype,
        rows=batch.rows,
        hidden=batch.hidden_size,
        traceparent=batch.traceparent or inject().get("traceparent", ""),
    )
    tensors = []
    for one in FEATURES.payload:
        whose = batch.rejected if one.name.startswith(_REJECTED) else batch
        if whose is not None:
            value = getattr(whose, one.name.removeprefix(_REJECTED))
            tensors.append(_tensor(one, value))

    return header, encode_safetensors(tensors)


def _tensor(declared: PayloadTensor, value: NamedTensor | npt.NDArray[Any]) -> NamedTensor:
    if isinstance(value, NamedTensor):
        return NamedTensor(declared.name, value.dtype, value.shape, value.data)
    return from_numpy(declared.name, np.asarray(value, dtype=NUMPY_CODES[declared.dtype]))


def decode_features(header: Mapping[str, str], payload: bytes) -> FeatureBatch:
    """The rows of an entry, as views of `payload`. Raises DataLoss for an entry that
    encode_features did not write.
    """
    try:
        return _decode(header, payload)
    except (ValueError, TypeError, OverflowError, RecursionError, InvalidInput) as error:
        raise DataLoss(
            "an entry does not decode as a feature batch", seen=f"{type(error).__name__}: {error}"
        ) from error


def _decode(header: Mapping[str, str], payload: bytes) -> FeatureBatch:
    values, computed = FEATURES.read_header(header)
    tensors = decode_safetensors(payload)
    rows = computed["rows"]
    sizes = {"T": rows, "T + 1": rows + 1, "H": computed["hidden"]}

    def part(name: str) -> Any:
        found = FEATURES.read_tensor(tensors, name, computed["dtype"], **sizes)
        return found if name.endswith("hidden") else as_numpy(found)

    parts = {one.name: one.name.startswith(_REJECTED) for one in FEATURES.payload}
    rejected = None
    if any(name.startswith(_REJECTED) for name in tensors):
        sizes["R"] = part("rejected_hidden").shape[0]
        drafts = [name for name, apart in parts.items() if apart]
        rejected = RejectedRows(**{name.removeprefix(_REJECTED): part(name) for name in drafts})

    return FeatureBatch(
        **values,
        **{name: part(name) for name, apart in parts.items() if not apart},
        traceparent=computed["traceparent"],
        rejected=rejected,
    )
