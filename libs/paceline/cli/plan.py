"""Writes the settings of a run: `paceline init`. Checks its demands on its machine before the
start: slots, ranks, memory.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from paceline.cli.run_files import found_models
from paceline.config import load
from paceline.errors import ConfigError
from paceline.local import checks, processes, services
from paceline.local.disk_plan import check_disk
from paceline.local.memory_plan import check_memory, fit_settings
from paceline.tasks.file import TaskFile
from paceline.tasks.generated import is_generated, other_seed, usual_reward
from paceline.tasks.verifiers import is_environment
from paceline.whole_files import write_whole

_TEMPLATE = Path(__file__).with_name("run.toml")
_NVIDIA_SMI_S = 20.0
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of GPU drivers; they exist even if the drivers' tools are not on PATH."""


class Checked(NamedTuple):
    """The plan of a run."""

    lines: list[str]
    """Sentences on the run's memory and disk, with a warning if they may run short."""
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
    found = services.settings_of_run(files, overrides)
    fitted = [] if elsewhere else fit_settings(found)
    if fitted:
        found = services.settings_of_run(files, [*overrides, *fitted])
    gateway, policy, coordinator = itemgetter("gateway", "policy_trainer", "coordinator")(found)
    on_gpus = services.gpu_settings(found)
    if gpus is None:
        gpus = gpu_bytes() if not elsewhere and (policy.device != "cpu" or on_gpus) else []
        if on_gpus and not (gpus or elsewhere or any(Path(one).exists() for one in _GPU_FILES)):
            seen = ", ".join(f"{key}=cuda" for key in on_gpus)
            raise ConfigError("this machine has no GPU", seen=seen, allowed="cpu")
    slots = gateway.worker_count * coordinator.slots_per_worker
    leased = coordinator.learner_slots or slots
    nodes = _policy_nodes(policy, coordinator.learner_slots)
    gpus_of_node = leased // nodes if elsewhere and on_gpus else len(gpus)
    ranks = nodes * _policy_ranks(policy.ranks // nodes, leased // nodes, gpus_of_node)
    _check_slots(found, ranks, slots, len(gpus))
    _check_correction(gateway, policy)
    start_s = max(gateway.engine.ready_deadline_s, policy.start_deadline_s)
    lines = [*check_disk(found), check_memory(found, ranks, gpus)]
    derived = [*fitted, *_derived(found, ranks)]
    return Checked(lines, derived, start_s, coordinator.steps)


def _policy_nodes(policy: Any, learner_slots: int) -> int:
    """Number of nodes of the policy's ranks. Raises ConfigError if these cannot share ranks and
    slots equally.
    """
    nodes: int = policy.run.policy_nodes
    if nodes > 1 and (not learner_slots or learner_slots % nodes or policy.ranks % nodes):
        raise ConfigError(
            "each of run.policy_nodes has an equal share of the policy's slots and ranks",
            seen=f"policy_nodes={nodes}, coordinator.learner_slots={learner_slots}, "
            f"policy_trainer.ranks={policy.ranks}",
            allowed="coordinator.placement=disaggregated, with multiples of policy_nodes",
        )
    return nodes


def _policy_ranks(wanted: int, slots: int, gpus: int) -> int:
    """Number of policy trainer ranks on a node, one per leased slot: with GPUs the minimum of slots
    and GPUs, on CPU at most two. Raises ConfigError if `wanted` exceeds the slots.
    """
    if wanted > slots:
        message = "the policy's ranks compute on leased slots, one each; set policy_trainer.ranks"
        seen = f"{wanted} ranks"
        raise ConfigError(message, seen=seen, allowed=f"0 to {slots}, the slots that it is leased")
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
        message = "coordinator.slots_per_worker is not the number of GPUs of a worker"
        allowed = f"{sglang.tensor_parallel_size} (gateway.engine.sglang.tensor_parallel_size)"
        raise ConfigError(message, seen=per_worker, allowed=allowed)
    if gpus and gateway.addresses.more_gateways:
        message = "gateways with GPUs are on nodes of their own"
        seen = f"{len(gateway.addresses.gateways)} gateways on this machine"
        allowed = "--launcher ray, or no addresses.more_gateways"
        raise ConfigError(message, seen=seen, allowed=allowed)
    apart = learner > 0 and sglang is not None and sglang.device != "cpu"
    for name, needed, used in (
        ("policy_trainer.ranks", ranks, policy == "cuda"),
        ("slots of the drafter", slots, drafter == "cuda"),
        ("slots of workers and learner", slots + learner, apart and policy == "cuda"),
    ):
        if gpus and used and needed > gpus:
            message = f"cuda needs one GPU for each of the {name}"
            raise ConfigError(message, seen=needed, allowed=f"at most {gpus}")


def _derived(found: Mapping[str, Any], ranks: int) -> list[str]:
    """Settings that follow from others.

    Raises ConfigError if the gateway writes no trajectories, if the trainer would drop groups that
    were rolled out for training, or if the engine cannot serve the trained drafter.
    """
    gateway, policy = found["gateway"], found["policy_trainer"]
    lag = found["coordinator"].policy_lag
    if gateway.trajectories is False:
        message = "a run needs the trajectories of its gateway"
        allowed = "true, or nothing; a gateway alone: paceline serve gateway"
        raise ConfigError(message, seen="gateway.trajectories=false", allowed=allowed)
    if policy.max_staleness is not None and policy.max_staleness < lag:
        raise ConfigError(
            "the policy trainer drops groups that the coordinator lets grow older; set "
            "policy_trainer.max_staleness",
            seen=policy.max_staleness,
            allowed=f"empty, or at least {lag} (coordinator.max_policy_lag)",
        )
    engine = gateway.engine
    if engine.kind == "sglang" and found["drafter_trainer"].options.get("norms"):
        message = "SGLang's EAGLE drafter has no norms; unset the option, or use another engine"
        allowed = "false; true with gateway.engine.kind=embedded"
        raise ConfigError(message, seen="drafter_trainer.options.norms=true", allowed=allowed)
    derived = {
        f"policy_trainer.ranks={ranks}": not policy.ranks,
        "gateway.trajectories=true": not gateway.trajectories,
        "coordinator.profile_stays=true": engine.kind == "sglang" and engine.sglang.profile,
        "drafter_trainer.gate.drafts=likeliest": engine.kind == "sglang",
        f"policy_trainer.max_staleness={lag}": policy.max_staleness is None and lag,
    }
    return [setting for setting, needed in derived.items() if needed]


def _check_correction(gateway: Any, policy: Any) -> None:
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
    elif policy.publish_dtype != "float32":
        drawn = policy.publish_dtype
        settings = [f"policy_trainer.publish_dtype={drawn}"]
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


def write_settings(
    file: Path, model: str, given: Mapping[str, Any], say: Callable[[str], None] = print
) -> Checked:
    """Writes a commented TOML for a run that trains this model, and returns the run's plan.

    `model`: a directory or a Hub id. `given`: the task files `tasks` and `heldout`, the `reward`,
    `agents`: external agents claim the tasks, or bring their own without `tasks`, and optionally
    the `environment` and the `python` of one of verifiers. Generated tasks and environments of
    verifiers have held-out tasks and a reward of their own. `say` receives progress lines of
    downloads.

    Raises ConfigError if the file exists or the settings cannot work, TaskFileError if tasks cannot
    be read.
    """
    if file.exists():
        raise ConfigError("this file is there already", seen=file, allowed="another name")
    given = {"environment": "", "python": "", **given}
    own = is_environment(given["environment"])
    if own:
        given["tasks"] = given["tasks"] or given["environment"]
    usual = usual_reward(given["tasks"], given["environment"])
    given |= {"reward": given["reward"] or usual, "usual": usual}
    if not given["heldout"] and (own or is_generated(given["tasks"])):
        given["heldout"] = other_seed(str(given["tasks"]))
    for name in ("tasks", "heldout"):
        if given[name]:
            TaskFile(given[name], python=given["python"])
    markup = Environment(  # noqa: S701  the result is TOML
        trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    markup.filters["quote"] = lambda value: load.toml_value(
        str(value) if isinstance(value, Path) else value
    )
    template = markup.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    names = {"file": file, "name": file.stem}
    write_whole(file, template.render(**names, model=model, **given))
    try:
        models = found_models([file], [], say)
        checked = plan_run([file], models)
        found = next((one.partition("=")[2] for one in models), model)
        return checked._replace(lines=[*checked.lines, *checks.check_reading(Path(found))])
    except ConfigError:
        file.unlink()
        raise
