"""The embedded PyTorch engine: our own forward, exactly lossless chain speculation, CPU first."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.models.config import read_config
from paceline.models.loading import DTYPES, build_weights, read_tensors
from paceline.trajectory import VersionSet
from rollout_gateway.engines.admission import Admission
from rollout_gateway.engines.base import Engine, RowSink
from rollout_gateway.engines.embedded.capture import Capture
from rollout_gateway.engines.embedded.engine import EmbeddedEngine
from rollout_gateway.engines.embedded.kv_cache import SlotStore
from rollout_gateway.engines.embedded.prefix_cache import PrefixCache
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
        # A captured prompt that is reused takes its rows from kept states.
        keep_hidden = speculation.needs_hidden or (sink is not None and spec.prefix_slots > 0)
        store = SlotStore(policy, spec.max_batch + spec.prefix_slots, capacity, keep_hidden=keep_hidden)
    versions = VersionSet(spec.seq, spec.policy_version, spec.drafter_version)
    return EmbeddedEngine(
        EngineWeights(policy, speculation, versions, capacity=capacity),
        speculation,
        Scheduler(spec.max_batch, spec.prefill_tokens),
        store,
        PrefixCache(spec.max_batch, spec.prefix_slots, capacity, store),
        Capture(sink, spec.features_dtype),
        admission,
    )


__all__ = ["EmbeddedSpec", "build_embedded"]
