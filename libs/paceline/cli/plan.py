"""Checks a run's demands on its machine before the start: slots, ranks, memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.arm_names import OFF
from paceline.config import load_config
from paceline.errors import ConfigError, PacelineError
from paceline.local import memory_plan, processes, run_settings, services
from paceline.local.memory_plan import PolicySizes, RunPlan, ServicePlan
from paceline.models.config import ModelConfig, read_config
from paceline.plugins import import_object
from paceline.speculators.kinds import inner_layers_read

_ENGINES = ("embedded", "sglang")
"""Engines that load the model."""
_ITEM = {"float32": 4, "bfloat16": 2}
_MOMENT = {"float32": memory_plan.FLOAT, "int8": memory_plan.INT8}
_NVIDIA_SMI_S = 20.0
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of GPU drivers; they exist even if the drivers' tools are not on PATH."""


class Checked(NamedTuple):
    """The plan of a run."""

    lines: list[str]
    """A sentence on the run's memory, with a warning if it may run short."""
    overrides: list[str]
    """Derived settings. Explicit settings are excluded, because their file may change before a
    service restarts.
    """
    start_s: float
    """Seconds until the slowest service gives up its own start, from the settings."""
    steps: int
    """RL steps of the run."""


def plan_run(
    files: Sequence[Path],
    overrides: Sequence[str],
    gpus: Sequence[int] | None = None,
    *,
    elsewhere: bool = False,
) -> Checked:
    """Checks a run's settings against its machine.

    `gpus`: bytes of each GPU; None: this machine's GPUs. `elsewhere`: the slots belong to a
    cluster, each with a GPU of unknown size.

    Raises ConfigError if slots and ranks conflict, or if a GPU is too small.
    """
    found = run_settings.settings_of_run(files, overrides)
    gateway, policy, drafter, coordinator = (
        found[name] for name in ("gateway", "policy_trainer", "drafter_trainer", "coordinator")
    )
    on_gpus = run_settings.gpu_settings(found)
    if gpus is None and elsewhere:
        gpus = []
    if gpus is None:
        gpus = gpu_bytes() if policy.device != "cpu" or on_gpus else []
        _check_gpus(on_gpus, gpus)
    if gpus and gateway.addresses.more_gateways:
        raise ConfigError(
            "gateways with GPUs are on nodes of their own",
            seen=f"{len(gateway.addresses.gateways)} gateways on this machine",
            allowed="--launcher ray, or no addresses.more_gateways",
        )
    per_worker = coordinator.slots_per_worker
    if gateway.engine.kind == "sglang":
        memory_plan.check_slots_per_worker(per_worker, gateway.engine.sglang.tensor_parallel_size)
    slots, cores = gateway.worker_count * per_worker, processes.usable_cores()
    leased = coordinator.learner_slots or slots
    count = leased if elsewhere and on_gpus else len(gpus)
    ranks = memory_plan.policy_ranks(policy.ranks, leased, cores=cores, gpus=count)
    if gpus:
        _check_enough("policy_trainer.ranks", policy.device, ranks, len(gpus))
        _check_enough("slots of the drafter", drafter.device, slots, len(gpus))
        engine = gateway.engine
        if coordinator.learner_slots and engine.kind == "sglang" and engine.sglang.device != "cpu":
            apart = slots + coordinator.learner_slots
            _check_enough("slots of workers and learner", policy.device, apart, len(gpus))
    _check_profiles(gateway.engine, coordinator.profiles)
    _check_correction(gateway, policy, coordinator.profiles)
    lines = _memory(found, ranks, gpus)
    chosen = [] if policy.ranks else [f"policy_trainer.ranks={ranks}"]
    chosen += _trajectories(gateway.trajectories)
    stays = gateway.engine.kind == "sglang" and gateway.engine.sglang.profile
    chosen += ["coordinator.profile_stays=true"] if stays else []
    chosen += _staleness(policy.max_staleness, coordinator.policy_lag)
    start_s = max(gateway.engine.ready_deadline_s, policy.start_deadline_s)
    return Checked(lines, chosen, start_s, coordinator.steps)


def _check_gpus(wanted: Sequence[str], gpus: Sequence[int]) -> None:
    """Raises ConfigError if a GPU is requested on a machine without GPUs."""
    if wanted and not gpus and not any(Path(path).exists() for path in _GPU_FILES):
        raise ConfigError(
            "this machine has no GPU",
            seen=", ".join(f"{key}=cuda" for key in wanted),
            allowed="cpu",
        )


def _check_enough(what: str, device: str, number: int, gpus: int) -> None:
    """Raises ConfigError if two ranks or slots would share a GPU."""
    if device == "cuda" and number > gpus:
        raise ConfigError(
            f"cuda needs one GPU for each of the {what}", seen=number, allowed=f"at most {gpus}"
        )


def _trajectories(written: bool | None) -> list[str]:
    """Enables trajectories in a run's gateway. Raises ConfigError if they are disabled."""
    if written is False:
        raise ConfigError(
            "a run needs the trajectories of its gateway",
            seen="gateway.trajectories=false",
            allowed="true, or nothing; a gateway alone: paceline serve gateway",
        )
    return [] if written else ["gateway.trajectories=true"]


def _staleness(bound: int | None, lag: int) -> list[str]:
    """The trainer's staleness limit, derived from the coordinator's policy lag.

    Raises ConfigError if the trainer would drop groups that were rolled out for training.
    """
    if bound is not None and bound < lag:
        raise ConfigError(
            "the policy trainer drops groups that the coordinator lets grow older; set "
            "policy_trainer.max_staleness",
            seen=bound,
            allowed=f"empty, or at least {lag} (coordinator.max_policy_lag)",
        )
    return [f"policy_trainer.max_staleness={lag}"] if bound is None and lag else []


def _check_profiles(engine: Any, profiles: Sequence[str]) -> None:
    """Raises ConfigError if the engine cannot switch to the profiles that an operator may
    choose.
    """
    if profiles and engine.kind == "sglang":
        raise ConfigError(
            "SGLang keeps the profile that it was started with; unset coordinator.profiles",
            seen=f"gateway.engine.kind={engine.kind}",
            allowed="embedded",
        )


def _check_correction(gateway: Any, policy: Any, profiles: Sequence[str]) -> None:
    """Raises ConfigError if tokens may be drawn in coarser numbers than in training, without a
    correction. The policy then drifts until it collapses.
    """
    engine = gateway.engine
    drawn, settings = engine.dtype, [f"gateway.engine.dtype={engine.dtype}"]
    rounded = {
        "embedded": {"profile": engine.embedded.profile} if engine.embedded.profile else {},
        "sglang": engine.sglang.rounding(engine.dtype),
    }.get(engine.kind, {})
    if rounded:
        drawn = "+".join(rounded.values())
        settings = [f"gateway.engine.{engine.kind}.{name}={one}" for name, one in rounded.items()]
    elif profiles:
        drawn, settings = "+".join(profiles), [f"coordinator.profiles={[*profiles]}"]
    elif policy.publish_dtype != "float32":
        drawn, settings = (
            policy.publish_dtype,
            [f"policy_trainer.publish_dtype={policy.publish_dtype}"],
        )
    correction = policy.algorithm.correction
    if drawn in ("float32", policy.compute_dtype) or correction.corrects:
        return
    if correction.required:
        raise ConfigError(
            "the engine draws tokens with coarser numbers than the trainer uses; set "
            "policy_trainer.algorithm.correction",
            seen=", ".join([*settings, f"policy_trainer.compute_dtype={policy.compute_dtype}"]),
            allowed="weight=token or sequence, keep=band or geometric, bypass=true, or "
            "required=false to measure the effect",
        )


def check_service(name: str, files: Sequence[Path], overrides: Sequence[str]) -> list[str]:
    """A sentence on the memory of one service that runs alone; none for a service without a model.

    Raises ConfigError if the settings cannot work or a GPU is too small.
    """
    spec = services.service(name)
    found = load_config(import_object(spec.settings), name, files, overrides)
    if name == "coordinator" or (name == "gateway" and found.engine.kind not in _ENGINES):
        return []
    gpus = gpu_bytes() if _on_gpus(name, found) else []
    try:
        plan = _service_plan(name, found, gpus)
    except PacelineError as error:
        if isinstance(error, ConfigError):
            raise
        return [f"memory is unknown: {error}"]  # the service reports the model's fault
    size, room = plan.total, min(gpus, default=0) - memory_plan.LIBRARIES
    if gpus and size > room:
        raise ConfigError(
            f"a GPU is too small for {name}",
            seen=memory_plan.shown(size),
            allowed=memory_plan.shown(room),
        )
    if gpus:
        return [f"memory of a GPU: {plan} of {memory_plan.shown(room)}"]
    return [memory_plan.together([plan], _ram())]


def _on_gpus(name: str, found: Any) -> bool:
    """Whether a service may compute on GPUs."""
    if name == "gateway":
        return bool(found.engine.kind == "sglang" and found.engine.sglang.device != "cpu")
    return bool(found.device != "cpu")


def _service_plan(name: str, found: Any, gpus: Sequence[int]) -> ServicePlan:
    """The memory of a service that runs alone."""
    if name == "gateway":
        model = read_config(found.model_dir, experts=found.engine.kind == "sglang")
        return _engine(found, model, _kept_states(found, model.num_layers), gpus)[0]
    model = read_config(Path(found.model))
    if name == "drafter_trainer":
        return _drafter_plan(found, model)
    ranks = memory_plan.policy_ranks(
        found.ranks,
        found.ranks or processes.usable_cores(),
        cores=processes.usable_cores(),
        gpus=len(gpus),
    )
    return _policy_plan(found, model, ranks, found.tokens_per_micro_batch)


def _policy_plan(policy: Any, model: ModelConfig, ranks: int, tokens: int) -> ServicePlan:
    """`tokens`: of the longest row of a micro-batch."""
    adapters = policy.adapters
    settings = PolicySizes(
        reshard=policy.reshard_after_forward,
        recompute=policy.recompute_activations,
        item=_ITEM[policy.compute_dtype],
        head_rows=policy.rows_of_logits(model.vocab_size),
        critic=policy.algorithm.name == "ppo",
        reference=policy.algorithm.kl.coefficient > 0,
        adapters=memory_plan.adapter_parameters(model, adapters.rank, adapters.targets),
        moment=_MOMENT[policy.optimizer.moments],
        offload=policy.offload,
    )
    return memory_plan.policy_plan(model, ranks=ranks, tokens=tokens, settings=settings)


def _drafter_plan(drafter: Any, model: ModelConfig) -> ServicePlan:
    return memory_plan.drafter_plan(
        model, ranks=drafter.ranks, tokens=drafter.max_micro_batch_tokens
    )


def _memory(found: dict[str, Any], ranks: int, gpus: Sequence[int]) -> list[str]:
    gateway, policy, drafter, coordinator = (
        found[name] for name in ("gateway", "policy_trainer", "drafter_trainer", "coordinator")
    )
    try:
        model = read_config(gateway.model_dir, experts=gateway.engine.kind == "sglang")
        states = _kept_states(gateway, model.num_layers)
    except PacelineError as error:
        return [f"memory is unknown: {error}"]  # the service reports the model's fault
    engine, on_gpus = _engine(gateway, model, states, gpus)
    if model.experts:
        return [f"memory: {engine}; a model with experts is served and not trained"]
    # A row is as long as the longest trajectory of its step.
    tokens = max(policy.tokens_per_micro_batch, gateway.engine.max_sequence_tokens)
    plan = RunPlan(
        engine,
        _policy_plan(policy, model, ranks, tokens),
        _drafter_plan(drafter, model),
        apart=coordinator.learner_slots > 0,
    )
    if gpus and on_gpus and drafter.device == "cuda":
        plan.check(min(gpus))
        return [plan.turns(min(gpus))]
    return [memory_plan.together(plan.services, _ram())]


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kept_states(gateway: Any, num_layers: int) -> int:
    """Hidden states per token that the embedded engine keeps for its drafter and its rows."""
    drafters = (gateway.drafter, *gateway.engine.embedded.more_drafters)
    if gateway.engine.kind != "embedded" or not (gateway.trajectories or set(drafters) - {OFF}):
        return 0
    return 1 + len(gateway.features.layers or inner_layers_read(drafters, num_layers))


def _engine(gateway: Any, model: Any, states: int, gpus: Sequence[int]) -> tuple[ServicePlan, bool]:
    """The plan of the engine's workers, and whether they use GPUs."""
    engine, workers = gateway.engine, gateway.worker_count
    item, own = _ITEM[engine.dtype], engine.sglang
    if engine.kind == "sglang":
        memory_plan.check_experts(model, own.tensor_parallel_size, own.expert_parallel_size)
        own.check_dtype(engine.dtype)
        own.check_model(model.experts)
    if engine.kind == "sglang" and own.device != "cpu" and gpus:
        plan = memory_plan.sglang_plan(
            model,
            workers=workers,
            tensor_parallel=own.tensor_parallel_size,
            item=item,
            pool=int(own.memory_fraction * min(gpus)),
            saver=own.memory_saver,
        )
        return plan, True
    embedded = engine.kind == "embedded"
    tokens = min(engine.max_sequence_tokens, model.max_position_embeddings)
    return memory_plan.embedded_plan(
        model,
        workers=workers,
        running=engine.max_batch,
        kept=engine.embedded.prefix_slots if embedded else 0,
        tokens=tokens,
        item=item,
        states=states,
        drafter=embedded and gateway.drafter != OFF,
        saver=engine.embedded.memory_saver,
        matrix_item=1 if engine.profile else 0,  # every profile has eight bits
    ), False


def gpu_bytes() -> list[int]:
    """Memory of each GPU from nvidia-smi, limited to CUDA_VISIBLE_DEVICES if set. Empty without
    nvidia-smi.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_S
        )
    except (subprocess.SubprocessError, OSError):
        return []  # the tool exists without a driver
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    sizes = list[int]()
    for index, uuid, mebibytes in _rows(said.stdout):
        if named is None or {index, uuid} & {one.strip() for one in named.split(",")}:
            sizes.append(int(mebibytes) << 20)
    return sizes


def _rows(said: str) -> Iterator[tuple[str, str, str]]:
    """Yields index, UUID and MiB of each GPU; skips other lines."""
    for line in said.splitlines():
        match [part.strip() for part in line.split(",")]:
            case [index, uuid, mebibytes] if mebibytes.isdigit():
                yield index, uuid, mebibytes
