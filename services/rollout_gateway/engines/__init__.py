"""Lists the engines behind one contract (base.py).

The table names their parts by import path, so that choosing one imports no other.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.plugins import find_variant


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Import paths of one engine's parts."""

    settings: str
    """A Config class; a WorkerSpec carries its values as JSON."""
    build: str = ""
    """(settings, row sink) -> Engine; empty: `process` is the engine's own."""
    row_layout: str = ""
    """Values of the settings -> RowLayout, because rings are cut before engines live; empty:
    RowLayout.last.
    """
    process: str = "paceline.services.rollout_gateway.engines.worker.process"
    """Module that a worker process runs."""
    extra: str = ""
    """What it is to be installed with (paceline/local/extras.py); empty: it needs nothing more, or
    says so itself.
    """
    starts_slowly: bool = False
    """A restart takes longer than a caller waits: its requests are refused meanwhile, tasks wait.
    """

    @property
    def forked(self) -> tuple[str, ...]:
        """Modules that a worker's parent imports for it; none where a worker is to begin anew."""
        return (self.process, self.build.partition(":")[0]) if self.build else ()


_EMBEDDED = "paceline.services.rollout_gateway.engines.embedded"
_SGLANG = "paceline.services.rollout_gateway.engines.sglang"
_SCRIPTED = "paceline.services.rollout_gateway.testing.scripted"

ENGINES = {
    "embedded": EngineKind(
        f"{_EMBEDDED}.spec:EmbeddedSpec",
        f"{_EMBEDDED}.build:build_embedded",
        f"{_EMBEDDED}.rows:layout_of_settings",
        extra="serve",
    ),
    "scripted": EngineKind(
        f"{_SCRIPTED}.script:ScriptedSpec", f"{_SCRIPTED}.engine:build_scripted"
    ),
    "sglang": EngineKind(
        f"{_SGLANG}.spec:SGLangSpec",
        row_layout=f"{_SGLANG}.rows:layout_of_settings",
        process=f"{_SGLANG}.host",
        starts_slowly=True,
    ),
}


def find_engine(name: str) -> EngineKind:
    """The engine of a name or an import path. Raises ConfigError."""
    kind = find_variant(name, ENGINES, "engine")
    if not isinstance(kind, EngineKind):
        raise ConfigError("no engine", seen=name, allowed="an EngineKind")
    return kind
