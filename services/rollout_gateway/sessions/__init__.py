"""Sessions: the exact tokens of a model's prompts and answers, and their rewards.

The package contains neither engine nor transport.
"""

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
    """The cause of a failed session: a machine, so the task may run again, or the task itself."""

    INFRA = "infra"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The purpose of a session."""

    run_id: str
    step: int = 0
    task_id: str = ""
    group_id: str = ""
    group_size: int = 1
    task_index: int = 0
    sample_index: int = 0
    trainable: bool = True
    override: bool = False  # untrainable sampling is replaced by the run's instead of refused
    temperature: float = 1.0  # of the run
    turn_discount: float | None = None  # one sample per turn, with discounted later rewards
    timeout_s: float = 0.0  # of silence; 0: the gateway's setting
    open_group: bool = False  # an agent's own group, taken by the step that finds it closed
    implicit: bool = False  # a conversation of a caller without a session
    seed: int | None = None  # of generations without a seed; None: from the operating system
    capture: bool = False  # hidden rows are sent to the drafter trainer
    forced_arm: str = ""  # of all its generations; empty: the bandit chooses
    # the run's, by the names of OpenAI's API, for an environment in a child process
    sampling: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
