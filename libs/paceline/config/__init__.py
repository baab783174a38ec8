"""Reads settings: one frozen tree per service, from TOML files and `key=value` overrides."""

from paceline.config.load import load_config, print_config
from paceline.config.shared import (
    SERVICE_SECTIONS,
    SHARED_SECTIONS,
    AddressesConfig,
    Config,
    OptimizerConfig,
    RedisConfig,
    RunConfig,
    SecurityConfig,
    ServiceConfig,
    TelemetryConfig,
    Temperature,
    known_keys,
)

__all__ = [
    "SERVICE_SECTIONS",
    "SHARED_SECTIONS",
    "AddressesConfig",
    "Config",
    "OptimizerConfig",
    "RedisConfig",
    "RunConfig",
    "SecurityConfig",
    "ServiceConfig",
    "TelemetryConfig",
    "Temperature",
    "known_keys",
    "load_config",
    "print_config",
]
