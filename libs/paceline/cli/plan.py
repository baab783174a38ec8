"""Checks a run's demands on its machine before the start: slots, ranks, memory."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.arm_names import OFF
from paceline.errors import ConfigError, PacelineError
from paceline.local import memory_plan, processes, run_settings
from paceline.local.memory_plan import ServicePlan
from paceline.models.config import ModelConfig, read_config
from paceline.speculators.kinds import inner_layers_read

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
    gateway, policy, coordinator = (
        found[name] for name in ("gateway", "policy_trainer", "coordinator")
    )
    on_gpus = run_settings.gpu_settings(found)
    if gpus is None:
        gpus = gpu_bytes() if not elsewhere and (policy.device != "cpu" or on_gpus) else []
        if on_gpus and not (gpus or elsewhere or any(Path(one).exists() for one in _GPU_FILES)):
            seen = ", ".join(f"{key}=cuda" for key in on_gpus)
            raise ConfigError("this machine has no GPU", seen=seen, allowed="cpu")
    slots = gateway.worker_count * coordinator.slots_per_worker
    leased = coordinator.learner_slots or slots
    ranks = _policy_ranks(policy.ranks, leased, leased if elsewhere and on_gpus else len(gpus))
    _check_slots(found, ranks, slots, len(gpus))
    _check_profiles(gateway.engine, coordinator.profiles)
    _check_correction(gateway, policy, coordinator.profiles)
    start_s = max(gateway.engine.ready_deadline_s, policy.start_deadline_s)
    lines = _memory(found, ranks, gpus)
    return Checked(lines, _derived(found, ranks), start_s, coordinator.steps)


def _policy_ranks(wanted: int, slots: int, gpus: int) -> int:
    """Number of policy trainer ranks, one per leased slot: with GPUs the minimum of slots and GPUs,
    on CPU at most two. Raises ConfigError if `wanted` exceeds the slots.
    """
    if wanted > slots:
        raise ConfigError(
            "the policy's ranks compute on leased slots, one each; set policy_trainer.ranks",
            seen=f"{wanted} ranks",
            allowed=f"0 to {slots}, the slots that it is leased",
        )
    return wanted or min(slots, gpus or min(2, processes.usable_cores()))


def _check_slots(found: Mapping[str, Any], ranks: int, slots: int, gpus: int) -> None:
    """Raises ConfigError if a worker's slots differ from its GPUs, or if two ranks or slots would
    share a GPU.
    """
    gateway, learner = found["gateway"], found["coordinator"].learner_slots
    policy, drafter = found["policy_trainer"].device, found["drafter_trainer"].device
    sglang = gateway.engine.sglang if gateway.engine.kind == "sglang" else None
    per_worker = found["coordinator"].slots_per_worker
    if sglang is not None and per_worker != sglang.tensor_parallel_size:
        raise ConfigError(
            "coordinator.slots_per_worker is not the number of GPUs of a worker",
            seen=per_worker,
            allowed=f"{sglang.tensor_parallel_size} (gateway.engine.sglang.tensor_parallel_size)",
        )
    if gpus and gateway.addresses.more_gateways:
        raise ConfigError(
            "gateways with GPUs are on nodes of their own",
            seen=f"{len(gateway.addresses.gateways)} gateways on this machine",
            allowed="--launcher ray, or no addresses.more_gateways",
        )
    apart = learner > 0 and sglang is not None and sglang.device != "cpu"
    for name, needed, used in (
        ("policy_trainer.ranks", ranks, policy == "cuda"),
        ("slots of the drafter", slots, drafter == "cuda"),
        ("slots of workers and learner", slots + learner, apart and policy == "cuda"),
    ):
        if gpus and used and needed > gpus:
            raise ConfigError(
                f"cuda needs one GPU for each of the {name}", seen=needed, allowed=f"at most {gpus}"
            )


def _derived(found: Mapping[str, Any], ranks: int) -> list[str]:
    """Settings that follow from others.

    Raises ConfigError if the gateway writes no trajectories, or if the trainer would drop groups
    that were rolled out for training.
    """
    gateway, policy, lag = (
        found["gateway"],
        found["policy_trainer"],
        found["coordinator"].policy_lag,
    )
    if gateway.trajectories is False:
        raise ConfigError(
            "a run needs the trajectories of its gateway",
            seen="gateway.trajectories=false",
            allowed="true, or nothing; a gateway alone: paceline serve gateway",
        )
    if policy.max_staleness is not None and policy.max_staleness < lag:
        raise ConfigError(
            "the policy trainer drops groups that the coordinator lets grow older; set "
            "policy_trainer.max_staleness",
            seen=policy.max_staleness,
            allowed=f"empty, or at least {lag} (coordinator.max_policy_lag)",
        )
    engine = gateway.engine
    derived = {
        f"policy_trainer.ranks={ranks}": not policy.ranks,
        "gateway.trajectories=true": not gateway.trajectories,
        "coordinator.profile_stays=true": engine.kind == "sglang" and engine.sglang.profile,
        f"policy_trainer.max_staleness={lag}": policy.max_staleness is None and lag,
    }
    return [setting for setting, needed in derived.items() if needed]


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


def _memory(found: Mapping[str, Any], ranks: int, gpus: Sequence[int]) -> list[str]:
    """A sentence on the run's memory, with a warning if it may run short. Raises ConfigError if a
    GPU is too small.
    """
    gateway, policy, drafter, coordinator = (
        found[name] for name in ("gateway", "policy_trainer", "drafter_trainer", "coordinator")
    )
    on_gpus = gateway.engine.kind == "sglang" and gateway.engine.sglang.device != "cpu" and gpus
    try:
        model = read_config(gateway.model_dir, experts=gateway.engine.kind == "sglang")
    except PacelineError as error:
        return [f"memory is unknown: {error}"]  # the service reports the model's fault
    engine = _engine_plan(gateway, model, min(gpus) if on_gpus else 0)
    if model.experts:
        return [f"memory: {engine}; a model with experts is served and not trained"]
    # A row is as long as the longest trajectory of its step.
    tokens = max(policy.tokens_per_micro_batch, gateway.engine.max_sequence_tokens)
    learner = memory_plan.policy_plan(model, policy, ranks, tokens)
    trainer = memory_plan.drafter_plan(
        model, ranks=drafter.ranks, tokens=drafter.max_micro_batch_tokens
    )
    if on_gpus and drafter.device == "cuda":
        apart = [[engine, trainer], [learner]]
        sharing = apart if coordinator.learner_slots else [[engine, learner, trainer]]
        return [memory_plan.check_gpus(sharing, min(gpus))]
    plans = (engine, learner, trainer)
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = sum(one.devices * one.total for one in plans)
    verdict = "memory may run short" if needed > ram else "memory"
    sizes = f"{memory_plan.format_size(needed)} of {memory_plan.format_size(ram)}"
    return [f"{verdict}: {sizes} ({', '.join(map(str, plans))})"]


def _engine_plan(gateway: Any, model: ModelConfig, gpu: int) -> ServicePlan:
    """The memory of the engine's workers. `gpu`: bytes of a GPU of SGLang; 0: without GPUs."""
    engine, workers, item = gateway.engine, gateway.worker_count, memory_plan.ITEM
    if engine.kind == "sglang":
        own = engine.sglang
        memory_plan.check_experts(model, own.tensor_parallel_size, own.expert_parallel_size)
        own.check_dtype(engine.dtype)
        own.check_model(model.experts)
        if gpu:
            return memory_plan.sglang_plan(
                model,
                workers=workers,
                tensor_parallel=own.tensor_parallel_size,
                item=item[engine.dtype],
                pool=int(own.memory_fraction * gpu),
                saver=own.memory_saver,
            )
    embedded = engine.kind == "embedded"
    drafters = (gateway.drafter, *engine.embedded.more_drafters)
    inner = gateway.features.layers or inner_layers_read(drafters, model.num_layers)
    keeps_states = embedded and (gateway.trajectories or set(drafters) - {OFF})
    return memory_plan.embedded_plan(
        model,
        workers=workers,
        sequences=engine.max_batch + (engine.embedded.prefix_slots if embedded else 0),
        tokens=min(engine.max_sequence_tokens, model.max_position_embeddings),
        item=item[engine.dtype],
        states=1 + len(inner) if keeps_states else 0,
        drafter=embedded and gateway.drafter != OFF,
        matrix_item=1 if engine.profile else 0,  # every profile has eight bits
    )


def gpu_bytes() -> list[int]:
    """Memory of each GPU from nvidia-smi, limited to CUDA_VISIBLE_DEVICES if set. Empty without
    nvidia-smi or its driver.
    """
    tool, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible == "":
        return []
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_S
        )
    except (subprocess.SubprocessError, OSError):
        return []  # the tool exists without a driver
    return [int(line) << 20 for line in done.stdout.split() if line.isdigit()]
