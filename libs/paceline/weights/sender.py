"""Pushes versions in order, each as a delta to the last one if that is less work. A sender works
alone or together with other senders of the same version.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import grpc

from paceline.errors import PacelineError, WeightsError
from paceline.telemetry import get_logger
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import Manifest
from paceline.weights.chunks import CheckedRange
from paceline.weights.delta import DELTA_BASE, DELTA_DAMAGED, encode_delta
from paceline.weights.manifest import layouts, target_name, version_name
from paceline.weights.metrics import DELTAS_LEFT
from paceline.weights.push import DAMAGED_TRIES, RECEIVERS_TIMES, PushReport, push_stream
from paceline.weights.shares import ALONE, Announced, Senders, cut_ranges, delta_manifest

Deltas = Literal["auto", "never"]
MOST_BYTES = 1 / 16
"""Largest size of a delta as a share of the content; it is held in memory as a whole."""
_REASONS = {DELTA_BASE: "base", DELTA_DAMAGED: "damaged"}
_SLOWEST = ("push_s", *RECEIVERS_TIMES)
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One version in its form for the wire, with this sender's parts of the stream."""

    manifest: Manifest
    ranges: tuple[CheckedRange, ...]
    whole: Announced = field(repr=False)
    encode_s: float
    rounds: int = 0  # rounds that ended with the version incomplete

    @property
    def is_delta(self) -> bool:
        """Whether the stream is a delta, not the content itself."""
        return self.manifest is not self.whole.manifest


Outcome = PushReport | PacelineError
"""Result of one sender's part of a parcel."""


class WeightSender:
    """Keeps the last pushed version of each target as the base of the next one. Its bytes must not
    change.

    A receiver without the base reports it, and the version is sent whole: after an abort, after a
    restart of either side, or with a damaged base. Several senders take the same three steps:
    `plan` together, `deliver` each its own parts, and `settle` over all outcomes, which decides
    the result of the push.
    """

    def __init__(self, deltas: Deltas = "auto", senders: Senders = ALONE) -> None:
        """`auto`: a delta of at most MOST_BYTES of the content. `never`: no base is kept."""
        self._deltas = deltas
        self._senders = senders
        self._bases: dict[int, Announced] = {}

    def plan(self, whole: Announced) -> Parcel:
        """Decides the form of a version on the wire. Collective."""
        started_s = time.monotonic()
        manifest, ranges = self._delta(whole) or (whole.manifest, whole.ranges)
        return Parcel(manifest, ranges, whole, time.monotonic() - started_s)

    async def deliver(
        self, channel: grpc.aio.Channel, parcel: Parcel, context: CommandContext, deadline_s: float
    ) -> Outcome:
        """Sends this sender's parts to the receiver. Returns the receiver's error, for `settle`."""
        manifest = parcel.manifest
        cut = partial(cut_ranges, manifest, parcel.ranges)
        try:
            return await push_stream(channel, manifest, cut, context, deadline_s=deadline_s)
        except PacelineError as error:
            return error

    def settle(self, parcel: Parcel, outcomes: Sequence[Outcome]) -> Parcel | PushReport:
        """The report of the whole push when the version is complete; otherwise the parcel to
        deliver next. `outcomes`: of each sender.

        Raises the error of any sender, and WeightsError when the version does not become complete.
        """
        reports = [one for one in outcomes if isinstance(one, PushReport)]
        if len(reports) < len(outcomes):
            errors = [one for one in outcomes if isinstance(one, PacelineError)]
            refusal = next((one for one in errors if one.reason in _REASONS), None)
            if refusal is None or not parcel.is_delta:
                raise errors[0]
            # Other senders may have failed because their version was dropped for the same reason.
            name = version_name(parcel.manifest)
            self._count_left(parcel.manifest, _REASONS[refusal.reason])
            _log.warning("delta_refused", version=name, error=str(refusal))
            whole = parcel.whole
            return Parcel(whole.manifest, whole.ranges, whole, parcel.encode_s)
        if all(one.missing for one in reports):  # the receiver has lost chunks
            if parcel.rounds + 1 < DAMAGED_TRIES:
                return replace(parcel, rounds=parcel.rounds + 1)
            name, missing = version_name(parcel.manifest), reports[0].missing
            raise WeightsError(f"{name} misses chunks", seen=missing, allowed=0)
        if self._deltas != "never":
            self._bases[parcel.manifest.target] = parcel.whole
        return PushReport(
            bytes=sum(one.bytes for one in reports),
            encoding=reports[0].encoding,
            encode_s=parcel.encode_s,
            **{name: max(getattr(one, name) for one in reports) for name in _SLOWEST},
            replaced=any(one.replaced for one in reports),
        )

    def forget(self, target: int | None = None) -> None:
        """Drops the base of a target, or of all targets; the next version is sent whole."""
        for one in [*self._bases] if target is None else [target]:
            self._bases.pop(one, None)

    def _delta(self, whole: Announced) -> tuple[Manifest, tuple[CheckedRange, ...]] | None:
        """Manifest of a delta, and this sender's part of it. None if any sender lacks the base, or
        if too many elements changed.
        """
        if self._deltas == "never":
            return None
        manifest, encoded = whole.manifest, None
        base, limit = self._bases.get(manifest.target), int(manifest.total_bytes * MOST_BYTES)
        if (
            base is not None
            and base.manifest.version != manifest.version
            and layouts(base.manifest) == layouts(manifest)
        ):
            places = [(one.number, one.first) for one in whole.held]
            encoded = encode_delta(base.tensors, whole.tensors, limit=limit, places=places)
        sizes = self._senders.exchange(None if encoded is None else len(encoded.stream))
        if base is not None and encoded is not None and None not in sizes and sum(sizes) <= limit:
            return delta_manifest(manifest, base.manifest, encoded.stream, self._senders)
        if base is not None:
            self._count_left(manifest, "changed")
        return None

    def _count_left(self, manifest: Manifest, reason: str) -> None:
        if self._senders.rank == 0:  # count once for all senders
            DELTAS_LEFT.record(target=target_name(manifest.target), reason=reason)
