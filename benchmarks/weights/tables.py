"""Makes the rows and goals of the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.result import Goal, Ratio, Row, at_most, paired_ratio, ratio_goal
from benchmarks.transport import TransferCost, transfer_s
from paceline.weights import PushReport
from paceline.weights.delta import EncodedDelta

BYTES_GOAL, COPY_GOAL, PUSH_GOAL, NEVER_SLOWER, RAW_GOAL = 0.03, 0.5, 10.0, 0.95, 0.6
FULL, DELTA, LOOKED = "full push", "delta", "full push after a look"
RAW, RAW_DELTA = "raw TCP, all", "raw TCP, the delta's bytes"


@dataclass(slots=True)
class WeightRuns:
    """Seconds in memory and costs of each transfer, by repeat."""

    copy: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    check: list[float] = field(default_factory=list)
    pushes: dict[str, list[PushReport]] = field(default_factory=dict)
    costs: dict[str, list[TransferCost]] = field(default_factory=dict)


def wire_s(report: PushReport) -> float:
    """Seconds of Prepare and of the stream alone."""
    return transfer_s(report) - report.encode_s - report.apply_s


def rows_of(size: str, encoded: EncodedDelta, measured: WeightRuns) -> list[Row]:
    """Makes the rows of one size."""
    total, sent = 2 * encoded.elements, len(encoded.stream)
    changed: Row = {
        "section": "changed",
        "weights": size,
        "changed %": 100 * encoded.changed / encoded.elements,
        "bytes %": 100 * sent / total,
        "bits a changed weight": 8 * sent / encoded.changed,
    }
    in_memory = {
        "copy, 1 thread": measured.copy,
        "encode": measured.encode,
        "copy and apply": measured.apply,
        "check the result": measured.check,
    }
    rows = [changed, *(_row(size, *one, total, measured.copy) for one in in_memory.items())]
    for name, costs in measured.costs.items():
        nbytes = sent if name in (DELTA, RAW_DELTA) else total
        rows.append(_transfer(size, name, nbytes, costs, measured.pushes.get(name, [])))
    return rows


def goals_of(encoded: EncodedDelta, measured: WeightRuns) -> list[Goal]:
    """Makes the goals of the largest size."""
    share = len(encoded.stream) / (2 * encoded.elements)
    raw = [one.wall_s for one in measured.costs[RAW]]
    full = paired_ratio(raw, [one.wall_s for one in measured.costs[FULL]])
    return [
        ratio_goal("full push / raw TCP copy", RAW_GOAL, full),
        at_most("bytes of the delta / of a full push", BYTES_GOAL, share),
        ratio_goal(
            "encode / copy in memory", COPY_GOAL, paired_ratio(measured.copy, measured.encode)
        ),
        ratio_goal(
            "copy and apply / copy in memory",
            COPY_GOAL,
            paired_ratio(measured.copy, measured.apply),
        ),
        ratio_goal("delta / full push, on the wire", PUSH_GOAL, _faster(measured, "wire")),
        ratio_goal(
            "delta / full push, encoded to checked in memory",
            PUSH_GOAL,
            _faster(measured, "transfer"),
        ),
        ratio_goal("delta / full push, spooled too", PUSH_GOAL, _faster(measured, "push")),
        ratio_goal(
            "full push after a look for a delta / full push",
            NEVER_SLOWER,
            _faster(measured, "transfer", LOOKED),
        ),
    ]


def _faster(measured: WeightRuns, span: str, than_full: str = DELTA) -> Ratio:
    """Speed relative to a full push."""
    of = {"wire": wire_s, "transfer": transfer_s, "push": lambda one: one.push_s}
    sides = [[of[span](one) for one in measured.pushes[name]] for name in (FULL, than_full)]
    return paired_ratio(*sides)


def _row(size: str, what: str, runs: Sequence[float], total: int, copies: Sequence[float]) -> Row:
    wall_s = statistics.median(runs)
    return {
        "section": "in memory",
        "weights": size,
        "what": what,
        "s": wall_s,
        "GB/s": total / wall_s / 1e9,
        "speed / copy": str(paired_ratio(copies, runs)),
    }


def _transfer(
    size: str, name: str, sent: int, costs: Sequence[TransferCost], pushes: Sequence[PushReport]
) -> Row:
    def middle(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "section": "transfers",
        "weights": size,
        "what": name,
        "MB": sent / 1e6,
        "in memory s": middle([one.wall_s for one in costs]),
        "encode s": middle([one.encode_s for one in pushes]),
        "wire s": middle([wire_s(one) for one in pushes]),
        "apply s": middle([one.apply_s for one in pushes]),
        "spool s": middle([one.spool_s for one in pushes]),
        "cpu s": middle([one.cpu_s for one in costs]),
        "sender MiB": round(max(one.sender_peak_mib for one in costs)),
        "far MiB": round(max(one.far_peak_mib for one in costs)),
    }
