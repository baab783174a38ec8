"""An embedded engine that is inexact on one path on purpose, so that an audit has a fault to find.

Only keys and values, or rounded weights, are damaged; all else is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway.engines import EngineKind
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec, layout_of_settings
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.trajectory import VersionSet

DAMAGE = 2.0
"""Factor by which values are damaged."""


class InexactSpec(EmbeddedSpec):
    """An embedded engine's settings, and the injected fault."""

    fault: Literal["", "reused", "drafted", "quantised"] = ""
    """Damages copied keys and values, keys and values of accepted drafts, or rounded weights."""


def build_inexact(spec: InexactSpec, sink: RowRing | None = None) -> Engine:
    """An engine with the fault of the settings."""
    engine = EmbeddedEngine(spec, sink)
    assert isinstance(engine, EmbeddedEngine)
    if spec.fault:
        _FAULTS[spec.fault](engine)
    return engine


def _damage_copies(engine: EmbeddedEngine) -> None:
    store, copy = engine._store, engine._store.copy

    def damaged(source: int, destination: int, start: int, stop: int) -> None:
        copy(source, destination, start, stop)
        store.kv.data[:, destination, :, start:stop] *= DAMAGE

    store.copy = damaged  # type: ignore[method-assign]


def _damage_drafts(engine: EmbeddedEngine) -> None:
    decoder, keep = engine._decoder, engine._decoder._keep

    def damaged(one: Any, verdict: Any) -> None:
        keep(one, verdict)
        for part in one.parts:
            for row in part.members:
                slot, root = int(one.slots[row]), int(one.roots[row])
                drafted = slice(root + 1, root + 1 + int(verdict.accepted[row]))
                engine._store.kv.data[:, slot, :, drafted] *= DAMAGE

    decoder._keep = damaged  # type: ignore[method-assign]


def _damage_rounding(engine: EmbeddedEngine) -> None:
    weights, commit = engine._weights, engine._weights.commit

    def damaged(versions: VersionSet) -> bool:
        changed = commit(versions)
        if changed and weights.prepared.serving.profile in ROUNDED:
            weights.policy.norm.div_(DAMAGE)
        return changed

    weights.policy.norm.div_(DAMAGE)
    weights.commit = damaged  # type: ignore[method-assign]


def layout_of_inexact(settings: Mapping[str, Any]) -> RowLayout:
    """The embedded engine's layout; an engine by import path does not receive the embedded engine's
    own settings.
    """
    return layout_of_settings({"more_drafters": (), "capture_inner": (), **settings})


_FAULTS: dict[str, Callable[[EmbeddedEngine], None]] = {
    "reused": _damage_copies,
    "drafted": _damage_drafts,
    "quantised": _damage_rounding,
}
INEXACT = EngineKind(
    f"{__file__}:InexactSpec",
    f"{__file__}:build_inexact",
    f"{__file__}:layout_of_inexact",
)
