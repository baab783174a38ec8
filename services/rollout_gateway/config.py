"""Declares the gateway's settings, with defaults and ranges."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from paceline.config import AddressesConfig, Config, ServiceConfig
from paceline.errors import ConfigError
from paceline.local.processes import usable_cores
from paceline.local.services import GATEWAY, numbered
from paceline.services.rollout_gateway.bandits.base import BanditConfig
from paceline.services.rollout_gateway.engine_config import EngineConfig
from paceline.services.rollout_gateway.engines.settings import Precision
from paceline.trajectory import TEMPERATURE


class SpeculationConfig(Config):
    """Arms and their choice."""

    arms: tuple[str, ...] = ()
    """Available arms; empty: the engine's default for its drafter."""
    forced_arm: str = ""
    """Arm of all rounds; empty: the bandit chooses."""
    bandit: BanditConfig = BanditConfig()


class FeaturesConfig(Config):
    """Hidden rows for the drafter trainer."""

    dtype: ClassVar[Precision] = "bfloat16"  # element type of hidden rows
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the training requests with captured rows."""
    layers: tuple[int, ...] = ()
    """Decoder layers with inputs in a row; empty: the drafters' layers."""
    byte_budget: int = Field(default=256 << 20, ge=1)
    """Maximum size of the features stream in Redis, bytes."""


class SessionsConfig(Config):
    """Limits of agents' sessions."""

    limit: int = Field(default=10_000, ge=1)
    """Maximum number of open sessions; further sessions are refused."""
    timeout_s: float = Field(default=3600, gt=0)
    """Silence after which a session ends unscored, seconds."""
    implicit_timeout_s: ClassVar[float] = 600  # silence after which such a session ends, seconds
    max_turns: int = Field(default=512, ge=1)
    """Maximum generations per session."""
    max_tokens: int = Field(default=1 << 20, ge=1)
    """Maximum tokens kept per session, prompts and responses."""
    max_parallel: int = Field(default=32, ge=1)
    """Maximum concurrent requests per session."""
    untrainable: Literal["refuse", "override"] = "refuse"
    """Treatment of untrainable sampling (top_p below 1, a penalty ...) in a trainable session:
    refuse the request, or override it with the run's sampling and report that in a header."""
    temperature: float = Field(default=1.0, ge=TEMPERATURE.low, le=TEMPERATURE.high)
    """Temperature of such a session outside the tasks of a run, which have their own."""
    ended_tokens: int = Field(default=1 << 18, ge=0)
    """Tokens of ended sessions kept for export, newest first, at about 100 bytes each."""
    group_deadline_s: ClassVar[float] = 3600.0  # from the first sibling's end to a group's close


class QueueConfig(Config):
    """Queue of requests for the engine, fair between session keys."""

    limit: int = Field(default=1024, ge=1)
    """Maximum waiting requests; further requests are refused."""
    per_key: ClassVar[int] = 256  # maximum waiting requests per session key
    running: int = Field(default=0, ge=0)
    """Maximum requests in the engine; 0: engine.max_batch plus one per worker."""
    wait_s: float = Field(default=120, gt=0)
    """Maximum wait of a request before its refusal, seconds."""


class CanaryConfig(Config):
    """The canary: the worker that tests a new version set, if there are two or more workers."""

    enabled: bool = True
    """Whether a canary tests each set before the other workers load it."""
    tokens: ClassVar[int] = 32  # tokens of each of the four probes for a new drafter
    accepted: ClassVar[float] = 0.25  # least accepted drafts per round, against the serving drafter
    deadline_s: float = Field(default=30, gt=0)
    """Maximum time of the canary's answer, seconds."""


class ApiConfig(Config):
    """The HTTP API."""

    model_names: tuple[str, ...] = ()
    """Model names of requests besides the directory's name; "*": any. Other names return 404."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages with access to the API, e.g. "https://console.example". "*": all
    origins, so any page in a browser on this machine can generate and end sessions."""
    keep_alive_s: ClassVar[int] = 75  # maximum silence of a connection between two requests


class ChatConfig(Config):
    """Rendering and parsing of conversations."""

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
    """Format of tool calls; auto: the format of the chat template."""
    tool_prompt: Literal["refuse", "default"] = "refuse"
    """Treatment of tools, past calls and results that the chat template drops. refuse: refuse the
    request; default: write them into the messages as text."""
    tool_grammars: Literal["always", "untrained", "never"] = "untrained"
    """Use of grammars for calls, which change log-probs. untrained: only without trained tokens;
    always: trainable sessions refuse such requests; never: a call's beginning alone is forced."""
    reasoning: Literal["auto", "none", "think"] = "auto"
    """Form of reasoning. think: between <think> and </think>; auto: as in the template."""


class SandboxConfig(Config):
    """Limits of a process for a model's code."""

    wall_s: float = Field(default=10, gt=0)
    """Maximum wall time of a run, seconds."""
    cpu_s: int = Field(default=5, ge=1)
    """Maximum CPU time of a process, seconds."""
    memory_bytes: int = Field(default=512 << 20, ge=1 << 24)
    """Maximum memory of all its processes together, and address space of each, bytes."""
    file_bytes: int = Field(default=16 << 20, ge=0)
    """Maximum size of a file, bytes. In namespaces its directory holds four times as much."""
    output_bytes: int = Field(default=64 << 10, ge=1)
    """Maximum kept output of stdout, and of stderr, bytes."""
    processes: int = Field(default=16, ge=1)
    """Maximum concurrent processes."""
    parallel: int = Field(default=4, ge=1)
    """Maximum concurrent sandboxes; further sandboxes wait."""
    isolation: Literal["auto", "namespaces", "landlock", "limits"] = "auto"
    """Isolation of the code. "namespaces": namespaces, Landlock and a system-call filter;
    "landlock": Landlock and filter; "auto": the strongest available. Each refuses to start without
    its layers. "limits": no isolation; the code has the rights of the gateway's user."""


class ToolServerConfig(Config):
    """A server of the Model Context Protocol with tools for the model."""

    command: tuple[str, ...] = ()
    """Program and its arguments; it speaks the protocol on its standard streams."""
    env: dict[str, str] = Field(default={}, repr=False)
    """Environment of the program, in addition to PATH, HOME and similar variables."""
    url: str = ""
    """URL of a running server (streamable HTTP), instead of a command."""
    token_env: str = ""
    """Environment variable with the bearer token for the server at url."""
    tools: tuple[str, ...] = ()
    """Tools of the server that the model may call; empty: all."""
    deadline_s: float = Field(default=30, gt=0)
    """Maximum time of its start, and of one call, seconds."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("a tool server has a command or a url")
        if self.command and self.token_env:
            raise ValueError("a token is sent to a url; a command takes env")
        return self


class RemoteRewardConfig(Config):
    """A reward at a URL: a POST of the episode as JSON, answered by {"reward": number or null}."""

    url: str = ""
    """URL of the rule; empty: none."""
    token: str = Field(default="", repr=False)
    """Bearer token of the requests."""
    deadline_s: float = Field(default=30, gt=0)
    """Maximum time of a score with its retries, seconds."""
    attempts: ClassVar[int] = 4  # maximum requests per score
    parallel: ClassVar[int] = 64  # maximum concurrent requests


class RewardsConfig(Config):
    """Reward rules."""

    marker: str = "#"
    """Text before the answer; the last occurrence in the response counts."""
    processes: int = Field(default=1, ge=1)
    """Number of child processes for rules outside the gateway process."""
    deadline_s: float = Field(default=30, gt=0)
    """Maximum time of a score in a child, seconds; then the sample is unscored."""
    own: dict[str, str] = Field(default={})
    """Your own rules: name in requests, and package.module:Class or file.py:Class."""
    mixtures: dict[str, dict[str, float]] = Field(default={})
    """Weighted sums of rules: name in requests, and a weight for each rule."""
    sandbox: SandboxConfig = SandboxConfig()
    remote: RemoteRewardConfig = RemoteRewardConfig()


class GatewayConfig(ServiceConfig):
    """Settings of `serve gateway`."""

    model: str = ""
    """Hugging Face checkpoint directory; its last path component is the served name."""
    tokenizer: str = ""
    """Directory of the tokenizer; empty: the model's."""
    drafter: str = "ngram"
    """Drafter: "off", "ngram", "self", a trained kind with fresh weights ("eagle",
    "package.module:KIND"), or a checkpoint directory.
    """
    trajectories: bool | None = None
    """Whether ledger, trajectories and features are written to Redis; empty: only in a run."""
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    features: FeaturesConfig = FeaturesConfig()
    spool_dir: str = ""
    """Directory of weights kept for restarts; empty: <run.dir>/spool/gateway in a run, a temporary
    directory without trajectories."""
    max_unsent_bytes: int = Field(default=64 << 20, ge=1)
    """Maximum size of trajectories not yet in Redis before admission stops, bytes."""
    sessions: SessionsConfig = SessionsConfig()
    queue: QueueConfig = QueueConfig()
    canary: CanaryConfig = CanaryConfig()
    api: ApiConfig = ApiConfig()
    chat: ChatConfig = ChatConfig()
    environments: dict[str, str] = Field(default={})
    """Your own environments: name in requests, and package.module:Class or file.py:Class."""
    tools: dict[str, str] = Field(default={})
    """Your own tools for the environment tool_use: name in calls, and package.module:function or
    file.py:function."""
    tool_servers: dict[str, ToolServerConfig] = Field(default={})
    """Servers of the Model Context Protocol, by name (the extra mcp)."""
    interactions: dict[str, str] = Field(default={})
    """Your own simulated users for tool_use: name in the tasks' metadata "interaction", and
    package.module:Class or file.py:Class. A single user applies to all tasks."""
    rewards: RewardsConfig = RewardsConfig()
    release_after_s: ClassVar[float] = 1.0  # idle time before a worker lends its slot
    reclaim_after_s: ClassVar[float] = 2.0  # callers' wait before the drafter's slots are reclaimed

    _number: int = PrivateAttr(default=0)
    _all_addresses: AddressesConfig | None = PrivateAttr(default=None)

    @property
    def number(self) -> int:
        """Number of this gateway in the run, from 0; addresses.more_gateways has the addresses of
        the gateways from number 1 on.
        """
        return self._number

    @property
    def name(self) -> str:
        """Name of this gateway's process, logs and directories."""
        return numbered(GATEWAY, self.number)

    @property
    def all_addresses(self) -> AddressesConfig:
        """Addresses of all gateways; `addresses` has this gateway's own first."""
        return self._all_addresses or self.addresses

    def of_gateway(self, number: int) -> Self:
        """The settings of one gateway of the run: its own addresses and spool. Raises ConfigError
        for a number without an address.
        """
        every = self.addresses
        if not 0 <= number < len(every.gateways):
            message, allowed = "there is no such gateway", f"0..{len(every.gateways) - 1}"
            raise ConfigError(f"addresses.more_gateways: {message}", seen=number, allowed=allowed)
        here = {"gateway": every.gateways[number], "http": every.gateways_http[number]}
        own = self.model_copy(update={"addresses": every.model_copy(update=here)})
        own._number, own._all_addresses = number, every
        return own

    @property
    def model_dir(self) -> Path:
        """The checkpoint directory. Raises ConfigError for a path that is no checkpoint
        directory.
        """
        if not self.model:
            allowed = "a Hugging Face checkpoint directory"
            raise ConfigError("gateway.model is not set", allowed=allowed)
        path = Path(self.model).expanduser()
        if not (path / "config.json").is_file():
            allowed = "a directory with config.json, tokenizer.json and model.safetensors"
            message = "gateway.model is not a checkpoint directory"
            raise ConfigError(message, seen=path, allowed=allowed)
        return path

    @property
    def worker_count(self) -> int:
        """Number of engine workers; one per core unless set."""
        return self.engine.workers or usable_cores()

    @property
    def spool(self) -> Path | None:
        """Directory of the committed and prepared versions. None outside a run: they end with the
        process.
        """
        if self.spool_dir:
            return Path(self.spool_dir) / self.name if self.number else Path(self.spool_dir)
        return Path(self.run.dir) / "spool" / self.name if self.trajectories else None
