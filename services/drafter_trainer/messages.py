"""Declares the commands to the ranks and the news from rank 0. Imports no torch."""

from dataclasses import dataclass, field
from typing import get_args

from paceline.ranks.messages import Doing, Impaired, Save, Saved
from paceline.speculators.shift import AcceptanceShift
from paceline.tagged_json import TaggedJson


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Measured costs of rounds in one batch-size group; see proto RoundCosts."""

    batch_group: int
    share: float
    costs: dict[str, float]
    rival: float


@dataclass(frozen=True, slots=True)
class Activate:
    """Train under this lease."""

    epoch: int
    step: int
    drafter_version: int  # the serving version
    max_steps: int  # 0: only the config's limit of epochs
    traceparent: str = ""
    round_costs: list[RoundCosts] = field(default_factory=list)
    # arm -> tokens of a drafted round in the last rollouts
    accept_lengths: dict[str, float] = field(default_factory=dict)
    # leased slots; member rank i computes on slot i
    slots: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True, slots=True)
class Join:
    """Train on these slots from now on: the activation's slots, then the new slots."""

    epoch: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop within one micro-batch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NewHead:
    """A policy head is in the spool."""

    policy_version: int
    path: str


@dataclass(frozen=True, slots=True)
class Serving:
    """This version set serves."""

    policy_version: int
    drafter_version: int


@dataclass(frozen=True, slots=True)
class Attached:
    """Training has started."""

    world_size: int


@dataclass(frozen=True, slots=True)
class SlotsJoined:
    """Training continues with added slots."""

    epoch: int
    slots: int  # of the activation, in total
    world_size: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A decision of the gate with its numbers; `path` has a promoted candidate.

    Lengths include the bonus token; noises are half-widths of 95 % intervals of the paired
    difference. A rollback has the numbers of the promotion that it reverts, if they are still
    available.
    """

    decision: str  # "promoted" | "kept" | "frozen" | "reopened" | "rolled_back"
    kind: str  # of the candidate
    drafter_version: int  # of the candidate, else of the serving drafter
    candidate: float = 0.0  # E[len]; 0 without a candidate
    serving: float = 0.0
    noise: float = 0.0
    candidate_speedup: float = 0.0
    serving_speedup: float = 0.0
    speedup_noise: float = 0.0
    costs_measured: bool = False  # by the engine; else configured
    policy_version: int = 0
    positions: int = 0
    optimizer_steps: int = 0
    temperature: float = 0.0
    lm_head_hash: str = ""
    path: str = ""  # directory of a promoted candidate
    survival: tuple[float, ...] = ()  # P(drafts 1 .. i all accepted)
    serving_survival: tuple[float, ...] = ()
    over: int = 0  # version that served before

    @property
    def shift(self) -> AcceptanceShift | None:
        """Shift from the serving drafter to the candidate; None without measurements."""
        if not self.survival:
            return None
        return AcceptanceShift(self.over, self.serving_survival, self.survival)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The activation is over; the slots are free."""

    epoch: int
    reason: str  # "preempted" | "epochs" | "no_data" | "max_steps" | "frozen"
    steps: int = 0
    micro_batches: int = 0
    tokens: int = 0
    loss: float = 0.0  # mean over the micro-batches
    busy_s: float = 0.0
    first_step_s: float = 0.0  # until the first micro-batch began; 0 without one
    total_steps: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of rank 0, sent when it is ready and after every change."""

    total_steps: int = 0
    buffer_samples: int = 0


Command = Activate | Join | Preempt | NewHead | Serving | Save
News = Attached | SlotsJoined | Judged | Stopped | Standing | Saved | Impaired | Doing
Message = Command | News
MESSAGES = TaggedJson[Message](*get_args(Message))
