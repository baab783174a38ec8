"""A made-up run with figures fixed in advance: journal entries and span files in the services'
form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.streams.journal import pack_entry

BEGAN_S = 1_700_000_000.0
STEP_S = 4.0
EVAL_S = 1.0
DRAFTER_S = 0.75  # slot 0, in every step
PREEMPT_WAIT_S = 0.05
SLOT_S = {"generating": 3.1, "policy": 3.7, "drafter": 0.75, "transferring": 0.4, "idle": 0.05}


def _slot(slot: int, holder: str, epoch: int) -> list[Any]:
    return [slot, 1, holder, epoch]


def _entry(
    at_s: float, event: str, step: int, phase: str, slots: Any = (), /, **data: Any
) -> dict[str, Any]:
    return {
        "v": 1,
        "at_s": at_s,
        "event": event,
        "data": data,
        "step": step,
        "phase": phase,
        "slots": list(slots),
    }


def record(step: int, steps: int) -> dict[str, Any]:
    """A StepRecord as JSON; rewards rise linearly from 0.5 to 0.9."""
    share = step / max(1, steps - 1)
    drafter = step // 10
    return {
        "step": str(step),
        "versions": {"seq": str(step), "policy": str(step), "drafter": str(drafter)},
        "reward_mean": 0.5 + 0.4 * share,
        "reward_parts": {"math_answer": 0.4 + 0.4 * share, "format": 1.0},
        "response_tokens": str(4000 + 10 * step),
        "rollout_s": 2.0,
        "policy_s": 1.9,
        "step_s": STEP_S,
        "accept_length": 1.2 + 2.6 * share + 0.15 * math.sin(step),
        "arm_rounds": {
            "off": str(60 - int(40 * share)),
            "eagle:3_1_4": str(10 + int(50 * share)),
            "ngram:4_1_5": "12",
        },
        **arm_figures(step, drafter),
        "drafter_steps": str(1 + step % 3),
        "drafter_slot_s": DRAFTER_S,
        "preempt_wait_s": PREEMPT_WAIT_S,
        "slot_s": SLOT_S,
        "idle_s": {"hand_over": 0.75 * SLOT_S["idle"], "trainer_done": 0.25 * SLOT_S["idle"]},
        "tokens_hash": f"{step:016x}",
        "near_ties": step % 2,
        "finished_at_s": BEGAN_S,
        "trace_id": f"{step + 1:032x}",
        "truncated_share": 0.1 * share,
        "groups_solved": {"by_none": 4, "by_some": 8, "by_all": 4},
        "response_length_quantiles": [20 + step // 8, 60, 120 + (step * 7) % 80],
    }


def arm_figures(step: int, drafter: int) -> dict[str, dict[str, str]]:
    """Each drafter version adds half a token per round; n-grams draft in every third step, 1.25
    tokens a round.
    """
    rounds = {"eagle:3_1_4": 40 + step}
    tokens = {"eagle:3_1_4": (40 + step) * (4 + drafter) // 2}
    if step % 3 == 0:
        rounds["ngram:4_1_5"], tokens["ngram:4_1_5"] = 8, 10
    by_name = {"arm_drafted_rounds": rounds, "arm_round_tokens": tokens}
    return {name: {arm: str(n) for arm, n in counts.items()} for name, counts in by_name.items()}


def entries(steps: int) -> Iterator[dict[str, Any]]:
    """Journal of a run on two slots: evaluations at both ends and every 10 steps, drafter on slot 0
    in every step.
    """
    now, epoch = BEGAN_S, 1
    versions = {"seq": 0, "policy": 0, "drafter": 0}
    yield _entry(
        now,
        "RunStarted",
        0,
        "evaluate",
        [_slot(i, "engine", epoch) for i in (0, 1)],
        versions=versions,
    )
    for step in range(steps + 1):
        if step % 10 == 0 or step == steps:
            for kind, low, high in (("accuracy", 0.5, 0.9), ("accept_length_probe", 1.1, 4.0)):
                value = low + (high - low) * step / steps
                now += EVAL_S / 2
                yield _entry(
                    now,
                    "EvaluationDone",
                    step,
                    "evaluate",
                    kind=kind,
                    value=value,
                    epoch=epoch,
                    details={},
                )
        if step == steps:
            break
        yield from _step(now, step, epoch, steps)
        now, epoch = now + STEP_S, epoch + 4
    yield _entry(now + 1.0, "CheckpointsSaved", steps, "finished", epoch=epoch, details={})


def _step(now: float, step: int, epoch: int, steps: int) -> Iterator[dict[str, Any]]:
    both = (0, 1)
    yield _entry(
        now,
        "StepBegan",
        step,
        "rollout",
        [_slot(i, "engine", epoch + 1) for i in both],
        step=step,
        traceparent=f"00-{step + 1:032x}-{1:016x}-01",
    )
    yield _entry(
        now + 1.2,
        "ShareDone",
        step,
        "rollout",
        [_slot(0, "drafter", epoch + 2)],
        worker=0,
    )
    freed = [_slot(1, "none", epoch + 1)]
    yield _entry(
        now + 1.9, "TasksFinished", step, "preempt", freed, details={"response_tokens": 4000}
    )
    yield _entry(
        now + 1.2 + DRAFTER_S,
        "Preempted",
        step,
        "policy",
        [_slot(i, "policy", epoch + 3) for i in both],
    )
    yield _entry(
        now + 1.90,
        "GateDecided",
        step,
        "rollout",
        epoch=epoch + 2,
        decision="kept" if step % 3 else "frozen",
    )
    yield _entry(
        now + 1.96,
        "Detached",
        step,
        "policy",
        epoch=epoch + 2,
        details={"tokens": 2000, "steps": 1, "first_step_s": 0.002},
        reason="preempted",
    )
    yield _entry(
        now + 3.8,
        "PolicyStepped",
        step,
        "policy",
        [_slot(i, "none", epoch + 3) for i in both],
    )
    committed = {"seq": step + 1, "policy": step + 1, "drafter": (step + 1) // 10}
    closing = [_slot(i, "engine", epoch + 4) for i in both]
    yield _entry(now + STEP_S, "Committed", step, "ready", closing, versions=committed) | {
        "record": record(step, steps)
    }


def write_journal(path: Path, steps: int) -> None:
    """Writes the journal file that a finished run leaves."""
    path.write_bytes(b"".join(pack_entry(entry) + b"\n" for entry in entries(steps)))


def span(
    name: str, service: str, span_id: int, start_ms: float, end_ms: float, **more: Any
) -> dict[str, Any]:
    """One line of a span file; `parent` and `links` are span numbers of the same trace."""
    trace = f"{more.get('trace', 1):032x}"
    return {
        "trace_id": trace,
        "span_id": f"{span_id:016x}",
        "parent_id": f"{more['parent']:016x}" if "parent" in more else "",
        "name": name,
        "kind": more.get("kind", "internal"),
        "service": service,
        "start_ns": int(BEGAN_S * 1e9 + start_ms * 1e6),
        "end_ns": int(BEGAN_S * 1e9 + end_ms * 1e6),
        "attributes": more.get("attributes", {}),
        "links": [f"00-{trace}-{link:016x}-01" for link in more.get("links", ())],
        "status": "unset",
    }
