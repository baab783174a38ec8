"""Declares the sections that several services read: run, redis, telemetry, security, addresses,
and the optimiser of both trainers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.addresses import loopback
from paceline.config.base import Config

RUN_ID = r"[a-z0-9-]{1,64}"
"""Pattern of a run's id."""
SHARED_SECTIONS = ("run", "redis", "telemetry", "security", "addresses")
SERVICE_SECTIONS = ("coordinator", "gateway", "policy_trainer", "drafter_trainer")


class RunConfig(Config):
    """Which run this is."""

    id: str = Field(default="local", pattern=f"^{RUN_ID}$")
    """Name of the run: prefix of its Redis keys, part of every message."""
    dir: str = "runs/local"
    """Directory of the run's files."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed from which all request seeds follow."""
    heartbeat_s: float = Field(default=3.0, ge=0)
    """Seconds that a process may be stopped (SIGSTOP); a longer stop ends in its replacement:
    services and Redis by their supervisor, ranks and engine workers by their service. A silent
    process that is not stopped gets six times as long. 0: no limit, for debuggers.
    """
    hung_s: float = Field(default=30.0, ge=0)
    """Seconds after which what runs and gets nowhere is killed and replaced: a service whose event
    loop does not turn, a Redis of the run's own that answers nothing. 0: never, as with
    heartbeat_s = 0.
    """
    handover: bool = True
    """Receivers take weights of senders on their host by file, from a directory of their own in
    `<dir>/handover`; false: by the network alone.
    """

    def handover_dir(self, receiver: str) -> Path | None:
        """Where files are handed over to a receiver; None where they are not."""
        return Path(self.dir) / "handover" / receiver if self.handover else None


class RedisConfig(Config):
    """Where the two roles of Redis are served; paceline.local.redis.resolved fills in what is
    empty.
    """

    durable_url: str = ""
    """Trajectories, ledger and journal; empty is $REDIS_URL, else a server of the run's own on a
    unix socket. One at redis://127.0.0.1:PORT without a password is started too, and gets one.
    Other forms: docs/operating.md.
    """
    features_url: str = ""
    """Hidden-state batches; empty is the durable one where that is given, else a server of the
    run's own."""

    @property
    def features(self) -> str:
        """URL of the features role."""
        return self.features_url or self.durable_url


class TelemetryConfig(Config):
    """What a process says about itself. OTLP export follows the standard OTEL_* variables."""

    spans_dir: str = ""
    """Directory of the local span files; empty writes none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is written."""
    log_json: bool = False
    """One JSON object per log line instead of console text."""
    prometheus: bool = True
    """Keep metrics in memory for GET /metrics; of the services, the gateway has that page."""


class SecurityConfig(Config):
    """Who may talk to the services. All off is right on loopback and refused elsewhere."""

    token_env: str = "PACELINE_TOKEN"  # noqa: S105  the name of a variable, not a secret
    """Environment variable that holds the operators' bearer token: it opens everything."""
    agent_token_env: str = "PACELINE_AGENT_TOKEN"  # noqa: S105
    """Environment variable that holds the agents' bearer token: sessions and generation."""
    run_tokens: bool = True
    """Where these variables are empty, keep tokens in <run.dir>/tokens, for this user alone."""
    tls_cert: str = ""
    """PEM file of this process's certificate chain."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_ca: str = ""
    """PEM file of the authority that peers' certificates must come from."""
    curve_key: str = ""
    """File of the CURVE key pair that events are encrypted with and opened by, the same in every
    process of a run; zmq.auth.create_certificates writes it (.key_secret).
    """
    allow_insecure: bool = False
    """Listen and connect beyond loopback without token, TLS and CURVE."""
    plain_ranks: bool = False
    """Let ranks of a trainer on several hosts exchange weights and gradients as they are: neither
    gloo, as torch is built, nor NCCL has TLS or asks for a token. For a network that these hosts
    alone reach.
    """

    @property
    def token(self) -> str:
        """The operators' token, read from the environment at each use; empty when there is none."""
        return os.environ.get(self.token_env, "") if self.token_env else ""

    @property
    def agent_token(self) -> str:
        """The agents' token, read likewise; empty: agents use the operators'."""
        return os.environ.get(self.agent_token_env, "") if self.agent_token_env else ""


class AddressesConfig(Config):
    """Where each service listens: host:port for gRPC and HTTP, a ZeroMQ endpoint for events."""

    coordinator: str = Field(default_factory=lambda: f"{loopback()}:7400")
    """gRPC of the coordinator."""
    gateway: str = Field(default_factory=lambda: f"{loopback()}:7401")
    """gRPC of the rollout gateway."""
    policy_trainer: str = Field(default_factory=lambda: f"{loopback()}:7402")
    """gRPC of the policy trainer."""
    drafter_trainer: str = Field(default_factory=lambda: f"{loopback()}:7403")
    """gRPC of the drafter trainer."""
    events: str = Field(default_factory=lambda: f"tcp://{loopback()}:7405")
    """ZeroMQ endpoint on which the coordinator publishes facts."""
    http: str = Field(default_factory=lambda: f"{loopback()}:7408")
    """OpenAI-compatible HTTP of the gateway."""


class OptimizerConfig(Config):
    """AdamW of a trainer."""

    lr: float = Field(default=1.5e-4, gt=0)
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly from lr / warmup_steps."""


class ServiceConfig(Config):
    """Base of a service's tree: the shared sections beside the service's own keys."""

    run: RunConfig = RunConfig()
    redis: RedisConfig = RedisConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    security: SecurityConfig = SecurityConfig()
    addresses: AddressesConfig = AddressesConfig()
