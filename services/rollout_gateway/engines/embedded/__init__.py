"""The embedded PyTorch engine: our own forward, exactly lossless chain speculation, CPU first."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.models.config import read_config
from paceline.models.loading import DTYPES, build_weights, read_tensors
from paceline.trajectory import VersionSet
from rollout_gateway.bandits import COST_MODEL
from rollout_gateway.engines.admission import Admission
from rollout_gateway.engines.base import Engine, RowSink
from rollout_gateway.engines.embedded.capture import Capture
from rollout_gateway.engines.embedded.engine import EmbeddedEngine
from rollout_gateway.engines.embedded.kv_cache import SlotStore
from rollout_gateway.engines.embedded.profile import profile
from rollout_gateway.engines.embedded.scheduler import Scheduler
from rollout_gateway.engines.embedded.spec import EmbeddedSpec
from rollout_gateway.engines.embedded.speculative import MAX_STEPS, Speculation
from rollout_gateway.engines.embedded.weights import EngineWeights


def build_embedded(spec: EmbeddedSpec, sink: RowSink | None = None) -> Engine:
    """An engine ready for requests.

    Raises InvalidInput, WeightsError, DataLoss or ConfigError for a checkpoint, drafter or arm that cannot work.
    """
    torch.set_num_threads(spec.threads)
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    admission = Admission(config, model_dir, spec.max_sequence_tokens)
    capacity = admission.max_sequence_tokens + MAX_STEPS + 1
    source = Path(spec.policy_path) if spec.policy_path else model_dir
    policy = build_weights(config, read_tensors(source), dtype=DTYPES[spec.dtype], positions=capacity)
    with torch.inference_mode():
        speculation = Speculation(spec, policy, spec.max_batch, capacity)
        store = SlotStore(policy, spec.max_batch, capacity, keep_hidden=speculation.needs_hidden)
    versions = VersionSet(spec.seq, spec.policy_version, spec.drafter_version)
    weights = EngineWeights(policy, speculation, versions, capacity=capacity)

    def engine(rows: RowSink | None) -> EmbeddedEngine:
        scheduler = Scheduler(spec.max_batch, spec.prefill_tokens)
        return EmbeddedEngine(weights, speculation, scheduler, store, Capture(rows, spec.features_dtype), admission)

    if spec.bandit.kind == COST_MODEL and len(speculation.arms) > 1:
        speculation.prime(profile(engine(None), spec.max_batch))
    return engine(sink)


__all__ = ["EmbeddedSpec", "build_embedded"]
