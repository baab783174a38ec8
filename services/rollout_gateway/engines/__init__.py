"""Engines behind one contract.

The table names builders by import path, so that choosing one imports no other.
"""

from __future__ import annotations

ENGINES = {
    "embedded": "rollout_gateway.engines.embedded.build:build_embedded",
    "scripted": "rollout_gateway.testing.scripted.engine:build_scripted",
}
SPECS = {
    "embedded": "rollout_gateway.engines.embedded.spec:EmbeddedSpec",
    "scripted": "rollout_gateway.testing.scripted.script:ScriptedSpec",
    "sglang": "rollout_gateway.engines.sglang.spec:SGLangSpec",
}
"""Settings class of each engine; a WorkerSpec carries its values as JSON."""
ROW_LAYOUTS = {
    "embedded": "rollout_gateway.engines.embedded.rows:layout_of_settings",
    "sglang": "rollout_gateway.engines.sglang.rows:layout_of_settings",
}
"""What hidden rows hold, from an engine's settings: rings are cut before engines live.

Not named: RowLayout.last.
"""
WORKER = "rollout_gateway.engines.worker.process"
PROCESSES = {"sglang": "rollout_gateway.engines.sglang.host"}
"""Module a worker process of an engine runs; WORKER for engines not named."""
