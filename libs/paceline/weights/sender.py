"""Pushes versions in order, each as a delta to the last one if that is less work. A sender works
alone or together with other senders of the same version.
"""

from __future__ import annotations

import asyncio
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
from paceline.weights.push import DAMAGED_TRIES, PushReport, push_deadline_s, push_stream
from paceline.weights.shares import ALONE, Announced, Senders, cut_ranges, delta_manifest

Deltas = Literal["auto", "never"]
MOST_BYTES = 1 / 16
"""Largest size of a delta as a share of the content; it is held in memory as a whole."""
_REASONS = {DELTA_BASE: "base", DELTA_DAMAGED: "damaged"}
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

    def entire(self) -> Parcel:
        """The same version as a full push."""
        whole = self.whole
        return Parcel(whole.manifest, whole.ranges, whole, self.encode_s)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of one sender's part of a parcel."""

    report: PushReport
    error: PacelineError | None = None


class WeightSender:
    """Keeps the last pushed version of each target as the base of the next one. Its bytes must not
    change.

    A receiver without the base reports it, and the version is sent whole: after an abort, after a
    restart of either side, or with a damaged base. Several senders take the same three steps:
    `plan` together, `deliver` each its own parts, and `settle` over all deliveries, which decides
    the result of the push.
    """

    def __init__(self, deltas: Deltas = "auto", senders: Senders = ALONE) -> None:
        """`auto`: a delta of at most MOST_BYTES of the content. `never`: no base is kept."""
        self._deltas = deltas
        self._senders = senders
        self._bases: dict[int, Announced] = {}

    async def push(
        self,
        channel: grpc.aio.Channel,
        whole: Announced,
        context: CommandContext,
        *,
        deadline_s: float | None = None,
    ) -> PushReport:
        """Pushes a version held by this sender alone. Called again after a failure, it sends only
        the remaining chunks. Raises as push_weights.
        """
        started_s, nbytes = time.monotonic(), whole.manifest.total_bytes
        deadline_s = push_deadline_s(nbytes) if deadline_s is None else deadline_s
        going: Parcel | PushReport = await asyncio.to_thread(self.plan, whole)
        while isinstance(going, Parcel):
            left_s = deadline_s - (time.monotonic() - started_s)
            going = self.settle(going, [await self.deliver(channel, going, context, left_s)])
        return replace(going, push_s=time.monotonic() - started_s)

    def plan(self, whole: Announced) -> Parcel:
        """Decides the form of a version on the wire. Collective."""
        started_s = time.monotonic()
        delta = self._delta(whole)
        encode_s = time.monotonic() - started_s
        if delta is None:
            return Parcel(whole.manifest, whole.ranges, whole, encode_s)
        return Parcel(*delta, whole, encode_s)

    async def deliver(
        self, channel: grpc.aio.Channel, parcel: Parcel, context: CommandContext, deadline_s: float
    ) -> Delivery:
        """Sends this sender's parts to the receiver."""
        manifest = parcel.manifest
        cut = partial(cut_ranges, manifest, parcel.ranges)
        try:
            report = await push_stream(channel, manifest, cut, context, deadline_s=deadline_s)
        except PacelineError as error:
            return Delivery(PushReport(0, 0.0), error)
        return Delivery(report)

    def settle(self, parcel: Parcel, deliveries: Sequence[Delivery]) -> Parcel | PushReport:
        """The report of the whole push when the version is complete; otherwise the parcel to
        deliver next.

        Raises the error of any sender, and WeightsError when the version does not become complete.
        """
        refused = self._refusal(parcel, deliveries)
        if refused:
            return parcel.entire()
        if all(one.report.missing for one in deliveries):  # the receiver has lost chunks
            if parcel.rounds + 1 < DAMAGED_TRIES:
                return replace(parcel, rounds=parcel.rounds + 1)
            name, missing = version_name(parcel.manifest), deliveries[0].report.missing
            raise WeightsError(f"{name} misses chunks", seen=missing, allowed=0)
        report = joined_report([one.report for one in deliveries])
        if self._deltas != "never":
            self._bases[parcel.manifest.target] = parcel.whole
        return replace(report, encode_s=parcel.encode_s)

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
            self._left(manifest, "changed")
        return None

    def _refusal(self, parcel: Parcel, deliveries: Sequence[Delivery]) -> bool:
        """Whether the receiver refused the delta in a way that a full push cures. Raises any other
        error.
        """
        errors = [one.error for one in deliveries if one.error is not None]
        refusals = [one for one in errors if parcel.is_delta and one.reason in _REASONS]
        if not refusals:
            if errors:
                raise errors[0]
            return False
        # Other senders may have failed because their version was dropped for the same reason.
        self._left(parcel.manifest, _REASONS[refusals[0].reason])
        _log.warning("delta_refused", version=version_name(parcel.manifest), error=str(refusals[0]))
        return True

    def _left(self, manifest: Manifest, reason: str) -> None:
        if self._senders.rank == 0:  # count once for all senders
            DELTAS_LEFT.record(target=target_name(manifest.target), reason=reason)


def joined_report(reports: Sequence[PushReport]) -> PushReport:
    """One report for the push of several senders."""
    return PushReport(
        bytes=sum(one.bytes for one in reports),
        push_s=max(one.push_s for one in reports),
        receive_s=max(one.receive_s for one in reports),
        spool_s=max(one.spool_s for one in reports),
        fan_out_s=max(one.fan_out_s for one in reports),
        encoding=reports[0].encoding,
        apply_s=max(one.apply_s for one in reports),
        replaced=any(one.replaced for one in reports),
    )
