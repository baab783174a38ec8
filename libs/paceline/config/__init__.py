"""Declares the base of every settings class, and the settings that several services share.

These are the sections run, redis, telemetry, security and addresses, and the optimiser of both
trainers.
"""

import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.addresses import loopback
from paceline.trajectory import TEMPERATURE


class Config(BaseModel):
    """A frozen node of a settings tree; rejects unknown keys.

    The docstring below a field is its description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


def child_configs(annotation: Any) -> tuple[type[Config], ...]:
    """The settings classes of a field: its own type, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    if getattr(annotation, "__origin__", None) in (tuple, list, dict, set, frozenset):
        return ()
    return tuple(child for member in get_args(annotation) for child in child_configs(member))


def walk_fields(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, annotation) for every leaf, in declaration order."""
    for name, field in cls.model_fields.items():
        children = child_configs(field.annotation)
        if not children:
            yield prefix + name, field.annotation
        for child in children:
            yield from walk_fields(child, f"{prefix}{name}.")


def known_keys(cls: type[Config]) -> list[str]:
    """All dotted keys of the tree, sorted and unique."""
    return sorted({key for key, _ in walk_fields(cls)})


RUN_ID = r"[a-z0-9-]{1,64}"
"""Pattern of a run's id."""
SHARED_SECTIONS = ("run", "redis", "telemetry", "security", "addresses")
SERVICE_SECTIONS = ("coordinator", "gateway", "policy_trainer", "drafter_trainer", "tinker")


def _drawable(temperature: float) -> float:
    if not TEMPERATURE.holds(temperature):
        raise PydanticCustomError(
            "temperature", f"Input should be {TEMPERATURE}: a smaller one overflows"
        )
    return temperature


Temperature = Annotated[
    float, Field(ge=0, le=TEMPERATURE.high, allow_inf_nan=False), AfterValidator(_drawable)
]
"""A softmax temperature within TEMPERATURE."""


class RunConfig(Config):
    """Identity and limits of the run."""

    id: str = Field(default="local", pattern=f"^{RUN_ID}$")
    """Name of the run: prefix of its Redis keys, part of every message."""
    dir: str = "runs/local"
    """Directory of the run's files."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all request seeds."""
    heartbeat_s: float = Field(default=3.0, ge=0)
    """Maximum stop of a process (SIGSTOP) before its replacement, seconds. Supervisors replace
    services and Redis; services replace ranks and engine workers. 0: no limit, for debuggers.
    """
    hung_s: float = Field(default=30.0, ge=0)
    """Maximum time without progress before a process is killed and replaced, seconds. It applies to
    a service with a blocked event loop, and to the run's own Redis without answers. 0: no limit,
    also with heartbeat_s = 0.
    """
    verifiers_python: str = ""
    """Python of environments "verifiers:ID", of a virtual environment of their own; empty: the
    Python of Paceline, with the extra verifiers.
    """
    policy_nodes: int = Field(default=1, ge=1)
    """Number of nodes of the policy trainer, each with an equal share of its ranks and of
    coordinator.learner_slots. Above 1 the policy needs slots of its own.
    """


class RedisConfig(Config):
    """Redis servers of both roles; paceline.local.redis.resolved fills in empty values."""

    durable_url: str = ""
    """Server of trajectories, ledger and journal. Empty: $REDIS_URL, else an own server on a unix
    socket. A server at redis://127.0.0.1:PORT without a password is also started, with a password.
    Other forms: docs/operating.md.
    """
    features_url: str = ""
    """Server of hidden-state batches. Empty: the durable server if it is set, else an own server.
    """

    @property
    def features(self) -> str:
        """URL of the features role."""
        return self.features_url or self.durable_url


class TelemetryConfig(Config):
    """Logs, spans and metrics. OTLP export follows the standard OTEL_* variables."""

    spans_dir: str = ""
    """Directory of the local span files; empty: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level in the log."""
    log_json: bool = False
    """One JSON object per log line instead of console text."""


class SecurityConfig(Config):
    """Access to the services. The defaults suit loopback and are refused elsewhere."""

    token_env: str = "PACELINE_TOKEN"  # noqa: S105  the name of a variable, not a secret
    """Environment variable with the operators' bearer token, which opens everything."""
    agent_token_env: ClassVar[str] = "PACELINE_AGENT_TOKEN"  # noqa: S105
    """Environment variable with the agents' bearer token, for sessions and generation."""
    run_tokens: bool = True
    """If these variables are empty, tokens in <run.dir>/tokens, readable for this user alone."""
    tls_cert: str = ""
    """PEM file of this process's certificate chain."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_ca: str = ""
    """PEM file of the authority of the peers' certificates."""
    curve_key: str = ""
    """File of the CURVE key pair that encrypts events, the same in every process of a run.
    zmq.auth.create_certificates writes it (.key_secret).
    """
    allow_insecure: bool = False
    """Permission to listen and connect beyond loopback without token, TLS and CURVE."""

    @property
    def token(self) -> str:
        """The operators' token, read from the environment at each use; empty if unset."""
        return os.environ.get(self.token_env, "") if self.token_env else ""

    @property
    def agent_token(self) -> str:
        """The agents' token, read from the environment at each use. If it is empty, agents use the
        operators' token.
        """
        return os.environ.get(self.agent_token_env, "") if self.agent_token_env else ""


class AddressesConfig(Config):
    """Addresses of the services: host:port for gRPC and HTTP, a ZeroMQ endpoint for events."""

    coordinator: str = Field(default_factory=lambda: f"{loopback()}:7400")
    """gRPC address of the coordinator."""
    gateway: str = Field(default_factory=lambda: f"{loopback()}:7401")
    """gRPC address of the rollout gateway."""
    policy_trainer: str = Field(default_factory=lambda: f"{loopback()}:7402")
    """gRPC address of the policy trainer."""
    drafter_trainer: str = Field(default_factory=lambda: f"{loopback()}:7403")
    """gRPC address of the drafter trainer."""
    events: str = Field(default_factory=lambda: f"tcp://{loopback()}:7405")
    """ZeroMQ endpoint of the coordinator's facts."""
    http: str = Field(default_factory=lambda: f"{loopback()}:7408")
    """OpenAI-compatible HTTP address of the gateway."""
    tinker: str = Field(default_factory=lambda: f"{loopback()}:7406")
    """gRPC address of the Tinker front, for health and progress."""
    tinker_http: str = Field(default_factory=lambda: f"{loopback()}:7409")
    """HTTP address of the Tinker front."""
    more_gateways: tuple[str, ...] = ()
    """gRPC addresses of gateways 1, 2, ... Each has `gateway.engine.workers` workers of its own, on
    its own host.
    """
    more_gateways_http: tuple[str, ...] = ()
    """HTTP addresses of the same gateways, in the same order."""

    @property
    def gateways(self) -> tuple[str, ...]:
        """gRPC addresses of all gateways, by number."""
        return (self.gateway, *self.more_gateways)

    @property
    def gateways_http(self) -> tuple[str, ...]:
        """HTTP addresses of all gateways, by number."""
        return (self.http, *self.more_gateways_http)

    def of(self, key: str) -> str:
        """The address under a key; `more_gateways.0` is the first of that list."""
        name, _, index = key.partition(".")
        value = getattr(self, name)
        return str(value[int(index)] if index else value)

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.more_gateways) != len(self.more_gateways_http):
            raise PydanticCustomError(
                "gateways",
                "addresses.more_gateways and addresses.more_gateways_http should have equally many "
                "addresses",
            )
        return self


class OptimizerConfig(Config):
    """AdamW of a trainer."""

    lr: float = Field(default=1.5e-4, gt=0)
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Maximum global gradient norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates of the linear warm-up, from lr / warmup_steps to lr."""


class ServiceConfig(Config):
    """Base of a service's settings: the shared sections beside the service's own keys."""

    run: RunConfig = RunConfig()
    redis: RedisConfig = RedisConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    security: SecurityConfig = SecurityConfig()
    addresses: AddressesConfig = AddressesConfig()
