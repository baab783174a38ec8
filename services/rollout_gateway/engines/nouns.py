"""Inputs and outputs of an engine: requests, chunks, counters and facts."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from enum import StrEnum
from operator import add, sub

from paceline.errors import MissingCapability
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import DrawSpan, SpeculationStats, VersionSpan
from paceline.v1 import engine_pb2 as pb


class Capability(StrEnum):
    """An optional ability of engines; a request for an undeclared capability gets
    MissingCapability.
    """

    CAPTURE = "capture"
    DRAFTER_UPDATE = "drafter_update"
    PENALTIES = "penalties"  # changes of logits before the draw: penalties, bias, min_tokens
    PROMPT_LOGPROBS = "prompt_logprobs"  # log-probs of the prompt, also without any generated token
    JSON_SCHEMA = "json_schema"  # responses that follow a JSON schema
    GRAMMARS = "grammars"  # responses by a regex, a choice or a grammar; such tool calls
    RELEASE_MEMORY = "release_memory"
    PROFILES = "profiles"  # a new set may have a different profile


_STRUCTURED = (
    "engine.kind=embedded or engine.kind=sglang, and a model directory with a tokenizer.json and "
    "an eos_token_id"
)
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
    Capability.JSON_SCHEMA: _STRUCTURED,
    Capability.GRAMMARS: _STRUCTURED,
    Capability.PROFILES: "engine.kind=embedded",
}
"""The settings that enable each optional capability."""


def missing(engine: str, capability: Capability) -> MissingCapability:
    """The error for a capability that the engine does not declare."""
    message = f"the {engine} engine lacks the capability {capability}"
    return MissingCapability(message, seen=engine, allowed=SETTINGS[capability])


class PauseMode(StrEnum):
    """Treatment of running requests while weights change."""

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class Finish(StrEnum):
    """The reason for the end of a request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request to an engine."""

    request_id: int
    prompt: tuple[int, ...]  # [T] token ids
    sampling: Sampling
    stream: bool = False
    capture: bool = False
    forced_arm: str = ""
    probe: bool = False  # the request's rounds do not update the bandit
    response: tuple[int, ...] = ()  # [n] earlier tokens, of any weights, to continue

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and earlier response, the tokens available at the start."""
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one request; finish is set on its last chunk."""

    request_id: int
    token_ids: tuple[int, ...]  # [n]
    behavior_logprobs: tuple[float, ...]  # [n]
    version_spans: tuple[VersionSpan, ...]  # indices count from the first response token
    finish: Finish | None = None
    error: str = ""
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    cached_prompt_tokens: int = 0
    smallest_gap: float = float("inf")
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # [n][k] (token id, log-prob)
    time_to_first_token_s: float = 0.0
    matched_stop: str = ""
    draw_spans: tuple[DrawSpan, ...] = ()  # indices as in version_spans
    stages: tuple[pb.StageTime, ...] = ()  # on the last chunk
    # one per prompt token except the first, on the first chunk of a request with prompt_logprobs
    prompt_scores: tuple[pb.PromptScore, ...] = ()
    accepted_drafts: tuple[bool, ...] = ()  # [n]


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Seconds of rounds by phase. If kernels run asynchronously, their time counts in the phase
    that waits for them.
    """

    rounds: int = 0
    nodes: int = 0  # tokens that the target verified: per row, one plus its drafts
    prefill_s: float = 0.0
    draft_s: float = 0.0
    forward_s: float = 0.0  # forward pass and head of the target
    sample_s: float = 0.0  # draws, verification, ends of requests
    keep_s: float = 0.0  # states, tokens and cache of accepted tokens; hidden rows

    def __add__(self, other: RoundSplit) -> RoundSplit:
        """Sum of both."""
        return RoundSplit(*map(add, astuple(self), astuple(other)))

    def __sub__(self, earlier: RoundSplit) -> RoundSplit:
        """Difference since `earlier`."""
        return RoundSplit(*map(sub, astuple(self), astuple(earlier)))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Content of one captured hidden row."""

    width: int  # values per row: H for each state
    layers: str  # states in order: "last", or layers with their input kept, e.g. "2,14,25,last"
    # "post_norm": "last" has passed the final norm; numbered states are before any norm.
    convention: str

    @classmethod
    def last(cls, hidden_size: int) -> RowLayout:
        """A row with only the input state of lm_head."""
        return cls.entering(hidden_size, ())

    @classmethod
    def entering(cls, hidden_size: int, inner: tuple[int, ...]) -> RowLayout:
        """A row with the residual streams entering these layers, then lm_head's input state."""
        layers = (*map(str, inner), "last")
        return cls(len(layers) * hidden_size, ",".join(layers), "post_norm")

    @property
    def inner(self) -> tuple[int, ...]:
        """Layers with their input in a row."""
        return tuple(int(name) for name in self.layers.split(",") if name != "last")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that do not change during the engine's lifetime, and its declared capabilities."""

    vocab_size: int
    hidden_size: int
    max_sequence_tokens: int
    arms: tuple[str, ...]
    capabilities: frozenset[Capability]
    rows: RowLayout
    device_tflops: float = 0.0  # measured by engines/requests/timing.py; 0: not measured
