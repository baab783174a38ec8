"""Defines what a session is for, its states and what ends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class SessionState(StrEnum):
    """Life of a session."""

    OPEN = "open"
    FINAL = "final"
    UNSCORED = "unscored"
    ABORTED = "aborted"
    FAILED = "failed"


class FailReason(StrEnum):
    """Whose fault ended a session: a machine's, so that the task may run again, or the task's
    own.
    """

    INFRA = "infra"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a session answers."""

    run_id: str
    step: int = 0
    task_id: str = ""
    group_id: str = ""
    group_size: int = 1
    task_index: int = 0
    sample_index: int = 0
    trainable: bool = True
    override: bool = False  # untrainable sampling gives way to the run's instead of being refused
    temperature: float = 1.0  # the run's
    turn_discount: float | None = None  # a sample per turn, with discounted later rewards
    timeout_s: float = 0.0  # of silence; 0: the gateway's setting
    open_group: bool = False  # an agent's own group, which belongs to the step that finds it closed
    implicit: bool = False  # nobody opened it: a conversation of a caller without a session
    seed: int | None = None  # of its generations that name none; None: from the operating system
    capture: bool = False  # hidden rows go to the drafter trainer
    metadata: Mapping[str, str] = field(default_factory=dict)
