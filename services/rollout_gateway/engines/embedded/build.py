"""Builds an embedded engine from its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from paceline.models.compiled import compiled_finish
from paceline.models.config import read_config
from paceline.models.decoder import DecoderWeights
from paceline.models.loading import DTYPES, build_weights, read_tensors
from paceline.speculators import CaptureSpec, SpeculatorSetup
from paceline.trajectory import VersionSet
from rollout_gateway.bandits import COST_MODEL
from rollout_gateway.engines.base import Engine, RowSink
from rollout_gateway.engines.embedded.arms import slack
from rollout_gateway.engines.embedded.capture import Capture
from rollout_gateway.engines.embedded.drafters import Drafters
from rollout_gateway.engines.embedded.engine import EmbeddedEngine
from rollout_gateway.engines.embedded.grammars import Grammars
from rollout_gateway.engines.embedded.kinds import engine_arms, engine_kinds
from rollout_gateway.engines.embedded.kv_cache import SlotStore
from rollout_gateway.engines.embedded.prefix_cache import PrefixCache
from rollout_gateway.engines.embedded.profile import profile
from rollout_gateway.engines.embedded.rows import row_layout
from rollout_gateway.engines.embedded.scheduler import Scheduler
from rollout_gateway.engines.embedded.spec import EmbeddedSpec
from rollout_gateway.engines.embedded.speculative import Speculation
from rollout_gateway.engines.embedded.weights import EngineWeights
from rollout_gateway.engines.requests.admission import Admission
from rollout_gateway.engines.requests.device_peak import square_product_tflops


def build_embedded(spec: EmbeddedSpec, sink: RowSink | None = None) -> Engine:
    """An engine ready for requests.

    Raises InvalidInput, WeightsError, DataLoss or ConfigError for a checkpoint, drafter or arm that
    cannot work.
    """
    torch.set_num_threads(spec.threads)
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    admission = Admission(config, model_dir, spec.max_sequence_tokens)
    inner = row_layout(model_dir, (spec.drafter, *spec.more_drafters), spec.capture_inner).inner
    kinds = engine_kinds(spec)
    arms = engine_arms(spec, kinds)
    capacity = admission.max_sequence_tokens + slack(arms.values())
    source = Path(spec.policy_path) if spec.policy_path else model_dir

    def load(path: Path) -> DecoderWeights:
        weights = build_weights(
            config,
            read_tensors(path),
            dtype=DTYPES[spec.dtype],
            positions=capacity,
            int8=spec.quantize == "int8",
        )
        return replace(weights, finish=compiled_finish()) if spec.compile else weights

    policy = load(source)
    with torch.inference_mode():
        setup = SpeculatorSetup(
            policy,
            spec.max_batch,
            capacity,
            policy.head.dtype,
            spec.seed,
            layers=CaptureSpec(inner).layers,
        )
        used = {arm.speculator for arm in arms.values()}
        speculation = Speculation(spec, arms, Drafters(kinds, used, setup, spec.drafter_path))
        # A captured prompt that is reused takes its rows from kept states.
        keep_hidden = speculation.drafters.needs_hidden or (
            sink is not None and spec.prefix_slots > 0
        )
        store = SlotStore(
            policy,
            spec.max_batch + spec.prefix_slots,
            capacity,
            keep_hidden=keep_hidden,
            inner=inner,
        )
    weights = EngineWeights(
        policy, speculation, VersionSet(spec.seq, spec.policy_version, spec.drafter_version), load
    )

    def engine(rows: RowSink | None) -> EmbeddedEngine:
        return EmbeddedEngine(
            weights,
            speculation,
            Scheduler(spec.max_batch, spec.prefill_tokens),
            store,
            PrefixCache(spec.max_batch, spec.prefix_slots, capacity, store, spec.prefix_tokens),
            Capture(rows, spec.features_dtype, rejected=spec.rejected_rows),
            admission,
            Grammars(config, model_dir),
            square_product_tflops(policy.head.device, policy.head.dtype),
        )

    if spec.bandit.kind == COST_MODEL and len(speculation.arms) > 1:
        speculation.measuring = True
        speculation.prime(profile(engine(None), speculation.served, spec.max_batch))
    return engine(sink)
