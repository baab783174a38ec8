"""The table of engines that implement the contract in base.py.

Entries are import paths, so choosing an engine does not import any other engine.
"""

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.plugins import find_variant


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Import paths of one engine's parts."""

    settings: str
    """Config class; a WorkerSpec carries its values as JSON."""
    build: str = ""
    """(settings, row sink) -> Engine; empty: `process` builds the engine itself."""
    row_layout: str = ""
    """Settings values -> RowLayout; rings are allocated before engines start. Empty:
    RowLayout.last.
    """
    process: str = "paceline.services.rollout_gateway.engines.worker.process"
    """Module that a worker process runs."""
    extra: str = ""
    """Optional dependencies that the engine needs (paceline/local/checks.py). Empty: none, or the
    engine checks them itself.
    """
    compares_text: bool = True
    """Whether the gateway compares its reading of the model's text with transformers'."""
    starts_slowly: bool = False
    """Whether a restart takes longer than callers wait. During a restart, requests are refused and
    tasks wait.
    """

    @property
    def forked(self) -> tuple[str, ...]:
        """Modules that the parent imports before it forks workers; empty if workers start without a
        fork.
        """
        return (self.process, self.build.partition(":")[0]) if self.build else ()


_EMBEDDED = "paceline.services.rollout_gateway.engines.embedded"
_SGLANG = "paceline.services.rollout_gateway.engines.sglang"

ENGINES = {
    "embedded": EngineKind(
        f"{_EMBEDDED}.spec:EmbeddedSpec",
        f"{_EMBEDDED}.engine:EmbeddedEngine",
        f"{_EMBEDDED}.spec:layout_of_settings",
        extra="serve",
    ),
    "sglang": EngineKind(
        f"{_SGLANG}.spec:SGLangSpec",
        row_layout=f"{_SGLANG}.spec:layout_of_settings",
        process=f"{_SGLANG}.host",
        starts_slowly=True,
    ),
}


def find_engine(name: str) -> EngineKind:
    """Returns the engine with this name or import path.

    Raises ConfigError.
    """
    kind = find_variant(name, ENGINES, "engine")
    if not isinstance(kind, EngineKind):
        raise ConfigError("no engine", seen=name, allowed="an EngineKind")
    return kind
