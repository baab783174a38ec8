"""Declares what goes into an engine and what comes out: requests, chunks, counters, facts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from paceline.errors import MissingCapability
from paceline.services.rollout_gateway.bandits.base import ArmReport
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import DrawSpan, SpeculationStats, VersionSpan


class Capability(StrEnum):
    """What an engine may lack; a caller asking for it then gets MissingCapability."""

    CAPTURE = "capture"
    DRAFTER_UPDATE = "drafter_update"
    PENALTIES = "penalties"  # what changes logits before the draw: penalties, bias, min_tokens
    PROMPT_LOGPROBS = "prompt_logprobs"  # log-probs of the prompt, with nothing generated too
    JSON_SCHEMA = "json_schema"  # responses that follow a JSON schema
    GRAMMARS = "grammars"  # those that follow a regex, a choice, a grammar; calls of tools that do
    RELEASE_MEMORY = "release_memory"
    PROFILES = "profiles"  # can serve a set under another profile than the one before
    REJECTED_ROWS = "rejected_rows"  # hidden rows of drafts that were verified and not accepted


SETTINGS = {
    Capability.RELEASE_MEMORY: "engine.kind=embedded, or engine.kind=sglang with "
    "engine.sglang.memory_saver=true on a GPU",
    Capability.CAPTURE: "gateway.trajectories=true, which gives every worker a ring for hidden "
    "rows",
    Capability.DRAFTER_UPDATE: "gateway.drafter naming a trained speculator or a drafter "
    "checkpoint",
    Capability.PENALTIES: "engine.kind=embedded or engine.kind=sglang",
    Capability.PROMPT_LOGPROBS: "engine.kind=embedded, or engine.kind=sglang without "
    "engine.sglang.arguments.enable_layernorm_sp",
    Capability.JSON_SCHEMA: "engine.kind=embedded or engine.kind=sglang, and a model directory "
    "with a tokenizer.json and an eos_token_id",
    Capability.GRAMMARS: "engine.kind=embedded or engine.kind=sglang, and a model directory "
    "with a tokenizer.json and an eos_token_id",
    Capability.PROFILES: "engine.kind=embedded",
    Capability.REJECTED_ROWS: "engine.kind=embedded, gateway.features.rejected=true and "
    "gateway.trajectories=true",
}
"""What to set to have a capability that engines may lack."""


def missing(engine: str, capability: Capability) -> MissingCapability:
    """The error for a capability that an engine has not declared."""
    return MissingCapability(
        f"the {engine} engine lacks the capability {capability}",
        seen=engine,
        allowed=SETTINGS.get(capability),
    )


class PauseMode(StrEnum):
    """What happens to running requests while weights change."""

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class MemoryTag(StrEnum):
    """Parts of an engine's device memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Withheld:
    """What an engine goes without because an audit found it inexact; see proto Quarantine."""

    arms: tuple[str, ...] = ()
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine sees it."""

    request_id: int
    prompt: tuple[int, ...]  # [T] token ids
    sampling: Sampling
    stream: bool = False
    capture: bool = False
    forced_arm: str = ""
    probe: bool = False  # its rounds teach the bandit nothing
    response: tuple[int, ...] = ()  # [n] tokens said before, under whatever weights: it goes on

    @property
    def known(self) -> tuple[int, ...]:
        """Tokens that are there when it begins."""
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class StageTime:
    """Where a part of a request's time in an engine went; see proto StageTime."""

    stage: str  # queue, prefill, decode
    arm: str = ""
    policy_version: int = 0
    start_ns: int = 0
    end_ns: int = 0
    busy_s: float = 0.0
    rounds: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptScore:
    """How likely the model finds a token of the prompt after those before it."""

    logprob: float  # of log_softmax(logits / temperature), temperature 0 as 1
    rank: int  # 1: the most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-prob), the likeliest first


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one request; finish is set on its last chunk."""

    request_id: int
    token_ids: tuple[int, ...]  # [n]
    behavior_logprobs: tuple[float, ...]  # [n]
    version_spans: tuple[VersionSpan, ...]  # indices from the first response token of the request
    finish: Finish | None = None
    error: str = ""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    cached_prompt_tokens: int = 0
    smallest_gap: float = float("inf")
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # [n][k] (token id, log-prob)
    time_to_first_token_s: float = 0.0
    matched_stop: str = ""
    draw_spans: tuple[DrawSpan, ...] = ()  # indices as in version_spans
    stages: tuple[StageTime, ...] = ()  # on the last chunk
    # of every prompt token but the first, on the first chunk of a request that asks for it
    prompt_scores: tuple[PromptScore, ...] = ()
    accepted_drafts: tuple[bool, ...] = ()  # [n]


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Where the seconds of rounds went; an engine whose kernels queue counts their wait where it
    waits.
    """

    rounds: int = 0
    nodes: int = 0  # tokens that the target verified: one per row and its drafts
    prefill_s: float = 0.0
    draft_s: float = 0.0
    forward_s: float = 0.0  # the target's forward and its head
    sample_s: float = 0.0  # draws, verification, ends of requests
    keep_s: float = 0.0  # states, tokens and cache of what was accepted; hidden rows

    def __add__(self, other: RoundSplit) -> RoundSplit:
        """Both together."""
        return RoundSplit(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    def __sub__(self, earlier: RoundSplit) -> RoundSplit:
        """What came since."""
        return RoundSplit(
            *(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self))
        )


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counters of prompts whose beginning was cached already; see proto PrefixStats."""

    prompt_tokens: int = 0  # of requests that have ended
    reused_tokens: int = 0  # those of them that were not computed
    lookups: int = 0
    lookup_s: float = 0.0  # finding what is cached
    copy_s: float = 0.0  # copying it, in and out of the cache


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load and statistics since start."""

    running: int
    waiting: int
    tokens_emitted: int  # but those of probes
    busy_s: float
    speculation: SpeculationStats
    arms: tuple[ArmReport, ...]
    rows_dropped: int = 0
    rows_invalid: int = 0  # of ended requests, whose slots held rows of other tokens or none
    # Rejected drafts beyond those whose rows are written per request and round.
    rejected_left_out: int = 0
    split: RoundSplit = field(default_factory=RoundSplit)
    prefixes: PrefixStats = field(default_factory=PrefixStats)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What one captured hidden row holds."""

    width: int  # values of a row: H for each of its states
    layers: str  # states in order: "last", or layers whose input it is, e.g. "2,14,25,last"
    # "post_norm": "last" has passed the final norm; numbered states are before any norm.
    convention: str

    @classmethod
    def last(cls, hidden_size: int) -> RowLayout:
        """The state lm_head reads and nothing else."""
        return cls.entering(hidden_size, ())

    @classmethod
    def entering(cls, hidden_size: int, inner: tuple[int, ...]) -> RowLayout:
        """The residual streams that enter these layers, then the state lm_head reads."""
        return cls(
            (len(inner) + 1) * hidden_size, ",".join((*map(str, inner), "last")), "post_norm"
        )

    @property
    def inner(self) -> tuple[int, ...]:
        """Layers whose input a row holds."""
        return tuple(int(name) for name in self.layers.split(",") if name != "last")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that do not change while the engine lives, and the capabilities it declares."""

    vocab_size: int
    hidden_size: int
    max_sequence_tokens: int
    arms: tuple[str, ...]
    capabilities: frozenset[Capability]
    rows: RowLayout
    device_tflops: float = 0.0  # as engines/requests/device_peak.py measures it; 0: not measured
