"""Hidden rows of one finished request as a stream entry. It owns their layout; not what a drafter
makes of them.

Row i is the target's state at the token of absolute position positions[i]; token_ids[i] is that
token, token_ids[i + 1] the next one. The state of the last token is absent: a request of N tokens
has T = N - 1 rows and T + 1 token ids.

A batch may also hold rows of drafts that were verified and rejected, in tensors of their own: a
reader that does not know them skips them, and a batch without them is written as if there were
none, so the schema version is one for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import SCHEMA_VERSION, checked, require_schema
from paceline.telemetry import inject
from paceline.tensors import (
    NamedTensor,
    as_numpy,
    decode_safetensors,
    encode_safetensors,
    from_numpy,
)

FEATURE_DTYPES = ("BF16", "F32")
_REJECTED = {"rejected_hidden", "rejected_token_ids", "rejected_positions", "rejected_parents"}


@dataclass(frozen=True, slots=True, eq=False)
class RejectedRows:
    """States at drafts that the target verified and rejected. R rows beside the T rows of the
    sequence.

    Row i is the state at token_ids[i] after the tokens that its parents lead back to. The target's
    distribution of the token after the draft is softmax(lm_head(hidden[i])); its probability of the
    draft itself follows in the same way from the parent's row. The head, and the policy version,
    are those of the sequence's row that the drafts hang under.
    """

    hidden: NamedTensor = field(repr=False)  # [R, H] of the sequence's dtype
    token_ids: npt.NDArray[np.int32] = field(repr=False)  # [R]
    positions: npt.NDArray[np.int32] = field(repr=False)  # [R] one more than the parent's
    parents: npt.NDArray[np.int32] = field(
        repr=False
    )  # [R] i < T: row i of the sequence; T + j: rejected row j before

    @property
    def rows(self) -> int:
        """R."""
        return self.hidden.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBatch:
    """Rows of one request. T rows, H hidden size."""

    run_id: str
    step: int
    session_id: str
    policy_version: int  # of the last row
    lm_head_hash: str  # head that belongs to the last row's version
    hidden: NamedTensor = field(repr=False)  # [T, H] BF16 or F32
    token_ids: npt.NDArray[np.int32] = field(repr=False)  # [T + 1]
    positions: npt.NDArray[np.int32] = field(repr=False)  # [T]
    mask: npt.NDArray[np.uint8] = field(repr=False)  # [T] 1 where the token was generated
    versions: npt.NDArray[np.int64] = field(repr=False)  # [T] policy version that computed the row
    layers: str = "last"
    convention: str = "post_norm"  # the final norm has been applied
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
        """Raises InvalidInput unless every rejected row has its parent before it, one position
        below.
        """
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
        """T."""
        return self.hidden.shape[0]

    @property
    def all_rows(self) -> int:
        """Those of rejected drafts included."""
        return self.rows + (self.rejected.rows if self.rejected is not None else 0)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.hidden.shape[1]


def encode_features(batch: FeatureBatch) -> tuple[dict[str, str], bytes]:
    """Fields and payload of one request's rows; the traceparent defaults to that of the current
    span.
    """
    fields = {
        "schema_version": SCHEMA_VERSION,
        "run": batch.run_id,
        "step": str(batch.step),
        "session": batch.session_id,
        "policy_version": str(batch.policy_version),
        "lm_head_hash": batch.lm_head_hash,
        "layers": batch.layers,
        "convention": batch.convention,
        "dtype": batch.hidden.dtype,
        "rows": str(batch.rows),
        "hidden": str(batch.hidden_size),
        "traceparent": batch.traceparent or inject().get("traceparent", ""),
    }
    places, states = _rejected_tensors(batch.rejected)
    tensors = [  # by falling size of their numbers, so that each lies aligned
        from_numpy("versions", batch.versions.astype("<i8", copy=False)),
        from_numpy("token_ids", batch.token_ids.astype("<i4", copy=False)),
        from_numpy("positions", batch.positions.astype("<i4", copy=False)),
        *places,
        NamedTensor("hidden", batch.hidden.dtype, batch.hidden.shape, batch.hidden.data),
        *states,
        from_numpy("mask", batch.mask.astype("u1", copy=False)),
    ]
    return fields, encode_safetensors(tensors)


def _rejected_tensors(rejected: RejectedRows | None) -> tuple[list[NamedTensor], list[NamedTensor]]:
    """What says where rejected rows hang, and their states; nothing when there are none."""
    if rejected is None:
        return [], []
    places = [
        from_numpy(f"rejected_{name}", getattr(rejected, name).astype("<i4", copy=False))
        for name in ("token_ids", "positions", "parents")
    ]
    hidden = rejected.hidden
    return places, [NamedTensor("rejected_hidden", hidden.dtype, hidden.shape, hidden.data)]


def decode_features(fields: Mapping[str, str], payload: bytes) -> FeatureBatch:
    """The rows of an entry, as views of `payload`; DataLoss when it is not what encode_features
    writes.
    """
    require_schema(fields)
    try:
        return _decode(fields, payload)
    except (KeyError, ValueError, TypeError, OverflowError, InvalidInput) as error:
        raise DataLoss(
            "an entry does not decode as a feature batch", seen=f"{type(error).__name__}: {error}"
        ) from error


def _decode(fields: Mapping[str, str], payload: bytes) -> FeatureBatch:
    tensors = decode_safetensors(payload)
    rows, hidden_size = int(fields["rows"]), int(fields["hidden"])

    def array(name: str, dtype: str, size: int) -> npt.NDArray[Any]:
        return as_numpy(checked(tensors, name, dtype, (size,)))

    return FeatureBatch(
        run_id=fields["run"],
        step=int(fields["step"]),
        session_id=fields["session"],
        policy_version=int(fields["policy_version"]),
        lm_head_hash=fields["lm_head_hash"],
        hidden=checked(tensors, "hidden", fields["dtype"], (rows, hidden_size)),
        token_ids=array("token_ids", "I32", rows + 1),
        positions=array("positions", "I32", rows),
        mask=array("mask", "U8", rows),
        versions=array("versions", "I64", rows),
        layers=fields["layers"],
        convention=fields["convention"],
        traceparent=fields["traceparent"],
        rejected=_decode_rejected(tensors, fields["dtype"], hidden_size)
        if _REJECTED & tensors.keys()
        else None,
    )


def _decode_rejected(
    tensors: Mapping[str, NamedTensor], dtype: str, hidden_size: int
) -> RejectedRows:
    hidden = checked(tensors, "rejected_hidden", dtype, (None, hidden_size))
    token_ids, positions, parents = (
        as_numpy(checked(tensors, f"rejected_{name}", "I32", (hidden.shape[0],)))
        for name in ("token_ids", "positions", "parents")
    )
    return RejectedRows(hidden, token_ids, positions, parents)
