"""Writes demo_lengths.json from a finished run's spans: `python -m
benchmarks.simulation.record_lengths RUN_DIRECTORY`.

The present file is from `paceline demo --steps 24`: every group of 8 samples, in the order in which
the rollouts began.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.simulation.lengths import DEMO
from paceline.report.spans import SpanRecord, read_spans
from paceline.telemetry import names


def groups_of(spans: Iterable[SpanRecord]) -> list[list[int]]:
    """Response tokens of each sample in each group that a run trains, by step and begin."""
    known = {one.span_id: one for one in spans}
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for one in sorted(known.values(), key=lambda one: one.start_ns):
        session = known.get(one.parent_id)
        if one.name != names.ENGINE_REQUEST or session is None or session.name != names.SESSION:
            continue
        rollout = known.get(session.parent_id)
        if rollout is None or rollout.attributes[names.SAMPLES_PER_TASK] == 1:
            continue  # cut off, or an evaluation: one sample a task
        group = groups.setdefault((rollout.span_id, session.attributes[names.TASK]), [])
        tokens = one.attributes[names.GEN_AI_OUTPUT_TOKENS]
        group.append((session.attributes[names.SESSION_ID], tokens))
    return [[tokens for _, tokens in sorted(group)] for group in groups.values()]


def main() -> None:
    """Writes the file."""
    spans = list(read_spans(Path(sys.argv[1]) / "spans"))
    groups = groups_of(spans)
    DEMO.write_text(json.dumps(groups, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(groups)} groups, {sum(map(len, groups))} responses, {DEMO.stat().st_size} bytes")


if __name__ == "__main__":
    main()
