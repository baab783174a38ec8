"""Builds an embedded engine from its settings."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.arm_names import ArmName
from paceline.local.processes import usable_cores
from paceline.models import decoder, in_place, loading, profiles
from paceline.models.config import read_config
from paceline.services.rollout_gateway.engines import base
from paceline.services.rollout_gateway.engines.embedded import (
    capture,
    drafters,
    kv_cache,
    prefill,
    speculative,
    verify,
)
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec, row_layout
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests import control, timing
from paceline.speculators.base import CaptureSpec, SpeculatorSetup


def build_embedded(spec: EmbeddedSpec, sink: base.RowSink | None = None) -> base.Engine:
    """Builds an engine that is ready for requests.

    Raises InvalidInput, WeightsError, DataLoss or ConfigError for an unusable checkpoint, drafter
    or arm.
    """
    torch.set_num_threads(spec.threads or usable_cores())
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    admission = control.Admission.of_model(config, model_dir, spec.max_sequence_tokens)
    inner = row_layout(model_dir, (spec.drafter, *spec.more_drafters), spec.capture_inner).inner
    kinds = drafters.engine_kinds(spec)
    arms = drafters.engine_arms(spec, kinds)
    capacity = admission.max_sequence_tokens + drafters.slack(arms.values())
    profile = profiles.chosen_profile(spec.profile)
    model = in_place.ServedModel(
        config, loading.DTYPES[spec.dtype], capacity, profile, start=model_dir
    )
    policy = model.load(model_dir)
    with torch.inference_mode():
        speculation = speculative.Speculation(
            spec, arms, _drafters(spec, kinds, arms, policy, capacity, inner)
        )
        store = kv_cache.SlotStore(
            policy,
            spec.max_batch + spec.prefix_slots,
            capacity,
            keep_hidden=speculation.drafters.needs_hidden or sink is not None,
            inner=inner,
        )
    return EmbeddedEngine(
        EngineWeights(policy, speculation, model, model_dir, memory_saver=spec.memory_saver),
        speculation,
        prefill.Scheduler(spec.max_batch, spec.prefill_tokens),
        store,
        kv_cache.PrefixCache(
            spec.max_batch, spec.prefix_slots, capacity, store, spec.prefix_tokens
        ),
        capture.Capture(sink, store, spec.features_dtype),
        admission,
        verify.Grammars(config, model_dir),
        timing.square_product_tflops(policy.head.device, policy.head.dtype),
    )


def _drafters(
    spec: EmbeddedSpec,
    kinds: drafters.Kinds,
    arms: dict[str, ArmName],
    policy: decoder.DecoderWeights,
    capacity: int,
    inner: tuple[int, ...],
) -> drafters.Drafters:
    setup = SpeculatorSetup(
        policy,
        spec.max_batch,
        capacity,
        policy.head.dtype,
        spec.seed,
        layers=CaptureSpec(inner).layers,
        answer_versions=spec.answer_versions,
    )
    used: dict[str, int] = {}
    for arm in arms.values():
        used[arm.speculator] = max(used.get(arm.speculator, 0), arm.shape.steps)
    return drafters.Drafters(kinds, used, setup)
