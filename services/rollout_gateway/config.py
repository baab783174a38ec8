"""Names the settings of the gateway, with defaults and ranges."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from paceline.config import Config, ServiceConfig
from paceline.errors import ConfigError
from paceline.local.processes import usable_cores
from paceline.services.rollout_gateway.bandits.base import BanditConfig
from paceline.services.rollout_gateway.engine_config import EngineConfig
from paceline.services.rollout_gateway.engine_places import number_of_places
from paceline.services.rollout_gateway.engines.settings import Precision
from paceline.trajectory import LEAST_TEMPERATURE


class SpeculationConfig(Config):
    """Arms and who chooses among them."""

    arms: tuple[str, ...] = ()
    """Arms to choose among; empty: the engine's default for its drafter."""
    forced_arm: str = ""
    """Arm of all rounds; empty: the bandit chooses."""
    bandit: BanditConfig = BanditConfig()


class FeaturesConfig(Config):
    """Hidden rows for the drafter trainer."""

    dtype: Precision = "bfloat16"
    """Element type of hidden rows."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the training requests whose rows are captured."""
    layers: tuple[int, ...] = ()
    """Inner states of a row, by the layer they enter; empty: what the drafters read."""
    rejected: bool = False
    """Also rows of drafts that were verified and rejected, at most 4 per request and round."""
    byte_budget: int = Field(default=256 << 20, ge=1)
    """Bytes of the features stream in Redis at most."""


class SessionsConfig(Config):
    """Sessions of agents, and what one of them may use."""

    limit: int = Field(default=10_000, ge=1)
    """Sessions open at once; more are refused."""
    timeout_s: float = Field(default=3600, gt=0)
    """Seconds of silence after which a session ends unscored."""
    implicit: bool = True
    """Callers without a session key get one per conversation, found again by its messages."""
    implicit_timeout_s: ClassVar[float] = 600
    """Seconds of silence after which such a session ends."""
    max_turns: int = Field(default=512, ge=1)
    """Generations of one session at most."""
    max_tokens: int = Field(default=1 << 20, ge=1)
    """Tokens kept for one session, prompts and responses."""
    max_parallel: int = Field(default=32, ge=1)
    """Requests of one session under way at most."""
    untrainable: Literal["refuse", "override"] = "refuse"
    """What a session to be trained does with sampling that cannot be trained (top_p below 1, a
    penalty ...): refuse the request, or draw with the run's own sampling and say so in a header.
    """
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE, le=10)
    """The temperature that such a session draws with, outside the tasks of a run, which have
    theirs.
    """
    ended_tokens: int = Field(default=1 << 18, ge=0)
    """Tokens of ended sessions kept for their export, those of the last ones; some 100 bytes each.
    """
    group_deadline_s: float = Field(default=3600, gt=0)
    """Seconds from the first sibling's end until a group closes as it is."""


class QueueConfig(Config):
    """Requests of callers that wait for the engine; fair between session keys."""

    limit: int = Field(default=1024, ge=1)
    """Requests waiting at once; more are refused."""
    per_key: ClassVar[int] = 256
    """Requests of one session key that wait at once."""
    running: int = Field(default=0, ge=0)
    """Requests in the engine at once; 0: engine.max_batch and one more a worker."""
    wait_s: float = Field(default=120, gt=0)
    """Seconds after which a waiting request is refused."""


class CanaryConfig(Config):
    """The worker that takes a new set first, where there are two or more."""

    enabled: bool = True
    """Have one worker judge a set before the others take it."""
    tokens: int = Field(default=32, ge=4)
    """Tokens drawn of each of four prompts to judge a new drafter."""
    accepted: float = Field(default=0.25, ge=0, le=1)
    """Drafts a round that have to be accepted, as share of the serving drafter's; 0 accepts any."""
    deadline_s: float = Field(default=30, gt=0)
    """Seconds until the canary has answered."""


class ApiConfig(Config):
    """The HTTP API."""

    model_names: tuple[str, ...] = ()
    """Further names that requests may ask for; "*" takes any. The model's directory name is always
    served, every other name is 404.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may talk to the API, e.g. "https://console.example"; "*": all, so that
    any page that a user of this machine has open can generate and end sessions.
    """
    keep_alive_s: int = Field(default=75, ge=1)
    """Seconds that a connection may be silent between two requests: an agent whose tools take
    longer connects anew for its next turn.
    """


class ChatConfig(Config):
    """How conversations are rendered and read."""

    tool_format: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "mistral",
        "qwen3_coder",
        "glm45",
        "deepseek_v3",
        "kimi_k2",
        "harmony",
    ] = "auto"
    """How tool calls are spelled; auto: what the chat template shows."""
    tool_prompt: Literal["refuse", "default"] = "refuse"
    """What becomes of tools, past calls and results that the chat template drops: refuse the
    request by their names; default: show them as text in the messages, in the format's spelling.
    """
    tool_grammars: Literal["always", "untrained", "never"] = "untrained"
    """Where a grammar holds calls to their tools' schemas (tool_choice "required" or a name, strict
    tools): untrained: where no tokens may be trained, whose log-probs it would change; always: a
    session to be trained refuses them; never: an answer is only begun as a call.
    """
    reasoning: Literal["auto", "none", "think"] = "auto"
    """Where a model reasons; think: between <think> and </think>; auto: there if its template does.
    """


class SandboxConfig(Config):
    """Limits of a process that runs code of a model."""

    wall_s: float = Field(default=10, gt=0)
    """Seconds of a run."""
    cpu_s: int = Field(default=5, ge=1)
    """Seconds of CPU time of a process."""
    memory_bytes: int = Field(default=512 << 20, ge=1 << 24)
    """Memory of all its processes together, and address space of each."""
    file_bytes: int = Field(default=16 << 20, ge=0)
    """Bytes of one file; in namespaces its directory holds four such, apart from memory_bytes."""
    output_bytes: int = Field(default=64 << 10, ge=1)
    """Bytes kept of stdout, and of stderr."""
    processes: int = Field(default=16, ge=1)
    """Processes at once."""
    parallel: int = Field(default=4, ge=1)
    """Sandboxes at once; more wait."""
    isolation: Literal["auto", "namespaces", "landlock", "limits"] = "auto"
    """What shuts a sandbox in: "namespaces" with Landlock and a system-call filter, "landlock" with
    the filter, "auto" the strongest of both that is there; each refuses to start without. "limits":
    nothing, the code reads files and opens sockets as the gateway's user.
    """


class ToolServerConfig(Config):
    """A server of the Model Context Protocol, whose tools a model may call."""

    command: tuple[str, ...] = ()
    """Program and its arguments, which speaks on its standard streams."""
    env: dict[str, str] = Field(default={}, repr=False)
    """Environment of the program, besides PATH, HOME and their like."""
    url: str = ""
    """Or where the server listens (streamable HTTP)."""
    token_env: str = ""
    """Environment variable with the bearer token that the server at a url asks for."""
    tools: tuple[str, ...] = ()
    """Those of its tools that are offered; empty: all."""
    deadline_s: float = Field(default=30, gt=0)
    """Seconds of its start, and of one call."""

    @property
    def place(self) -> str:
        """Where it is."""
        return self.url or " ".join(self.command)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("a tool server has a command or a url")
        if self.command and self.token_env:
            raise ValueError("a token is sent to a url; a command takes env")
        return self


class RemoteRewardConfig(Config):
    """A reward at a URL: POST with the episode as JSON, answered by {"reward": number or null}."""

    url: str = ""
    """Where to ask; empty: there is no such reward."""
    token: str = Field(default="", repr=False)
    """Sent as bearer token."""
    deadline_s: float = Field(default=30, gt=0)
    """Seconds of one score, retries included."""
    attempts: int = Field(default=4, ge=1)
    """Requests for one score at most."""
    parallel: int = Field(default=64, ge=1)
    """Requests at once."""
    breaker_failures: int = Field(default=8, ge=1)
    """Failures in a row after which nobody asks for breaker_open_s."""
    breaker_open_s: float = Field(default=10, gt=0)
    """Seconds for which nobody asks then."""


class ModelRewardConfig(Config):
    """A reward model: a sequence-classification checkpoint in a process of its own."""

    model: str = ""
    """Checkpoint directory."""
    threads: int = Field(default=1, ge=1)
    """Compute threads."""
    max_batch: int = Field(default=16, ge=1)
    """Texts scored at once."""
    max_tokens: int = Field(default=2048, ge=8)
    """Tokens of a text; of a longer one the end counts."""
    deadline_s: float = Field(default=60, gt=0)
    """Seconds of one score."""


class RewardsConfig(Config):
    """Reward rules."""

    marker: str = "#"
    """The answer of a response follows the last of these."""
    processes: int = Field(default=1, ge=1)
    """Children that score for rules which do not run in the gateway."""
    deadline_s: float = Field(default=30, gt=0)
    """Seconds of one score in a child; then it is killed and the sample unscored."""
    own: dict[str, str] = Field(default={})
    """Rules of your own: the name that requests use, and package.module:Class or file.py:Class."""
    mixtures: dict[str, dict[str, float]] = Field(default={})
    """Weighted sums of rules: the name that requests use, and a weight for each rule."""
    sandbox: SandboxConfig = SandboxConfig()
    remote: RemoteRewardConfig = RemoteRewardConfig()
    model: ModelRewardConfig = ModelRewardConfig()


class GatewayConfig(ServiceConfig):
    """Everything `serve gateway` understands; shared sections come from ServiceConfig."""

    model: str = ""
    """Hugging Face checkpoint directory; served under its last path component."""
    tokenizer: str = ""
    """Directory of the tokenizer; empty: the model's."""
    drafter: str = "ngram"
    """What drafts: "off", "ngram", a trained kind with fresh weights ("eagle",
    "package.module:KIND"), or a checkpoint directory.
    """
    trajectories: bool | None = None
    """Write ledger, trajectories and features to Redis; empty: in a run, not by itself."""
    replicas: int = Field(default=1, ge=1)
    """Processes (elsewhere called fronts, or API servers) that share the gateway's workers,
    sessions and tasks behind its addresses, on one host; with several a thin process in front of
    them holds the addresses and the spool. Each needs a core, and a worker, of which it lends out
    all but the last in open traffic.
    """
    replica_port: int = Field(default=0, ge=0, le=65_535)
    """First of the ports at which hosts of engine workers join the replicas, one each; 0: free
    ones.
    """
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    features: FeaturesConfig = FeaturesConfig()
    spool_dir: str = ""
    """Directory of weights kept for restarts; empty: <run.dir>/spool/gateway in a run, a temporary
    one without trajectories.
    """
    max_unsent_bytes: int = Field(default=64 << 20, ge=1)
    """Bytes of trajectories not yet in Redis above which admission stops."""
    sessions: SessionsConfig = SessionsConfig()
    queue: QueueConfig = QueueConfig()
    canary: CanaryConfig = CanaryConfig()
    api: ApiConfig = ApiConfig()
    chat: ChatConfig = ChatConfig()
    environments: dict[str, str] = Field(default={})
    """Environments of your own: the name that requests use, and package.module:Class or
    file.py:Class.
    """
    tools: dict[str, str] = Field(default={})
    """Tools of your own for the environment tool_use: the name that a model calls, and
    package.module:function or file.py:function.
    """
    tool_servers: dict[str, ToolServerConfig] = Field(default={})
    """Servers of the Model Context Protocol, by a name of yours (the extra mcp)."""
    interactions: dict[str, str] = Field(default={})
    """Simulated users of your own for tool_use: the name that tasks use in metadata "interaction",
    and package.module:Class or file.py:Class. A single one is that of all tasks.
    """
    rewards: RewardsConfig = RewardsConfig()
    siblings: Literal["together", "dealt"] = "together"
    """Where the samples of a task decode: together on one worker as far as equal shares allow, or
    dealt out over the workers in turn. Together, a worker whose tasks are short is done earlier,
    and its slot trains the drafter; dealt out, the workers end closer to each other.
    """
    release_after_s: float = Field(default=1.0, gt=0)
    """Seconds after which an idle worker gives its slot away, in open traffic."""
    reclaim_after_s: ClassVar[float] = 2.0
    """Seconds that requests of callers wait for lent workers before the coordinator hears of it and
    takes the drafter's slots back.
    """

    @property
    def model_dir(self) -> Path:
        """The checkpoint directory. Raises ConfigError in one line when it is none."""
        if not self.model:
            raise ConfigError(
                "gateway.model is not set", allowed="a Hugging Face checkpoint directory"
            )
        path = Path(self.model)
        if not (path / "config.json").is_file():
            raise ConfigError(
                "gateway.model is not a checkpoint directory",
                seen=path,
                allowed="a directory with config.json, tokenizer.json and model.safetensors",
            )
        return path

    @property
    def worker_count(self) -> int:
        """Engine workers of the start; one per place of `hosts`, else per core, unless set."""
        return self.engine.workers or sum(self.engine.hosts) or usable_cores()

    @property
    def worker_places(self) -> int:
        """Engine workers that there may be. Raises ConfigError as number_of_places."""
        engine = self.engine
        return number_of_places(self.worker_count, engine.most_workers, engine.hosts, self.replicas)

    @property
    def places_here(self) -> int:
        """Those of `worker_places` on the gateway's own host."""
        return self.engine.hosts[0] if self.engine.hosts else self.worker_places

    @property
    def spool(self) -> Path | None:
        """Directory of the committed and prepared versions; None outside a run: they end with the
        process.
        """
        if self.spool_dir:
            return Path(self.spool_dir)
        return Path(self.run.dir) / "spool" / "gateway" if self.trajectories else None
