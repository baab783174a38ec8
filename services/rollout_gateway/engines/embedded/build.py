"""Builds an embedded engine from its settings."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.arm_names import ArmName
from paceline.local.processes import usable_cores
from paceline.models.config import ModelConfig, read_config
from paceline.models.decoder import DecoderWeights
from paceline.models.in_place import ServedModel
from paceline.models.loading import DTYPES
from paceline.models.profiles import chosen_profile
from paceline.services.rollout_gateway.engines.base import Engine, RowSink
from paceline.services.rollout_gateway.engines.embedded.capture import Capture
from paceline.services.rollout_gateway.engines.embedded.drafters import Drafters
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.grammars import Grammars
from paceline.services.rollout_gateway.engines.embedded.kinds import (
    Kinds,
    engine_arms,
    engine_kinds,
    slack,
)
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.embedded.prefix_cache import PrefixCache
from paceline.services.rollout_gateway.engines.embedded.rows import row_layout
from paceline.services.rollout_gateway.engines.embedded.scheduler import Scheduler
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.embedded.speculative import Speculation
from paceline.services.rollout_gateway.engines.embedded.threads import choose_threads
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests.admission import Admission
from paceline.services.rollout_gateway.engines.requests.device_peak import square_product_tflops
from paceline.speculators.base import CaptureSpec, SpeculatorSetup


def build_embedded(spec: EmbeddedSpec, sink: RowSink | None = None) -> Engine:
    """Builds an engine that is ready for requests.

    Raises InvalidInput, WeightsError, DataLoss or ConfigError for an unusable checkpoint, drafter
    or arm.
    """
    torch.set_num_threads(spec.threads or usable_cores())
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    admission = Admission.of_model(config, model_dir, spec.max_sequence_tokens)
    inner = row_layout(model_dir, (spec.drafter, *spec.more_drafters), spec.capture_inner).inner
    kinds = engine_kinds(spec)
    arms = engine_arms(spec, kinds)
    capacity = admission.max_sequence_tokens + slack(arms.values())
    model = served_model(spec, config, capacity)
    policy = model.load(model_dir)
    with torch.inference_mode():
        speculation = Speculation(spec, arms, _drafters(spec, kinds, arms, policy, capacity, inner))
        store = _store(spec, speculation, policy, capacity, inner, captured=sink is not None)
    weights = EngineWeights(policy, speculation, model, model_dir, memory_saver=spec.memory_saver)

    def engine(rows: RowSink | None, tflops: float = 0.0) -> EmbeddedEngine:
        return EmbeddedEngine(
            weights,
            speculation,
            Scheduler(spec.max_batch, spec.prefill_tokens),
            store,
            PrefixCache(spec.max_batch, spec.prefix_slots, capacity, store, spec.prefix_tokens),
            Capture(rows, store, spec.features_dtype),
            admission,
            Grammars(config, model_dir),
            tflops,
        )

    if spec.threads == 0:
        cores = usable_cores() if policy.head.device.type == "cpu" else 1
        speculation.measuring = True
        choose_threads(engine(None), speculation.served, cores, spec.max_batch)
        speculation.forget_rounds()
    return engine(sink, square_product_tflops(policy.head.device, policy.head.dtype))


def served_model(spec: EmbeddedSpec, config: ModelConfig, positions: int) -> ServedModel:
    """The engine's way of serving policy versions.

    Raises InvalidInput for an unknown profile.
    """
    return ServedModel(
        config,
        DTYPES[spec.dtype],
        positions,
        chosen_profile(spec.profile),
        start=Path(spec.model_dir),
    )


def _drafters(
    spec: EmbeddedSpec,
    kinds: Kinds,
    arms: dict[str, ArmName],
    policy: DecoderWeights,
    capacity: int,
    inner: tuple[int, ...],
) -> Drafters:
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
    return Drafters(kinds, used, setup)


def _store(
    spec: EmbeddedSpec,
    speculation: Speculation,
    policy: DecoderWeights,
    capacity: int,
    inner: tuple[int, ...],
    *,
    captured: bool,
) -> SlotStore:
    keep_hidden = speculation.drafters.needs_hidden or captured  # capture reads the kept states
    slots = spec.max_batch + spec.prefix_slots
    return SlotStore(policy, slots, capacity, keep_hidden=keep_hidden, inner=inner)
