"""Launches SGLang as an engine: `python -m paceline.services.rollout_gateway.engines.sglang.host`.

Builds SGLang's arguments and environment, starts SGLang and waits until it ends. This process
serves no requests: the gateway's peer is the plugin in SGLang's rank-0 scheduler (plugin/). Host
and children end together, whatever the cause.
"""

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import psutil

import paceline
from paceline.addresses import loopback
from paceline.errors import ConfigError, PacelineError
from paceline.local.memory_plan import check_experts
from paceline.local.ports import free_ports
from paceline.local.processes import LOOPBACK_ONLY, PARENT_VARIABLE, die_with_parent
from paceline.local.user_directory import process_directory, socket_directory, sweep_with_us
from paceline.models.config import read_config, read_config_json
from paceline.services.rollout_gateway.engines.sglang.hook_points import RELEASE
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import ArmChooser
from paceline.services.rollout_gateway.engines.sglang.spec import QUANTIZATION, SGLangSpec
from paceline.services.rollout_gateway.engines.worker import SPEC_VARIABLE, WorkerSpec
from paceline.services.rollout_gateway.engines.worker.process import Peer, begin
from paceline.speculators.kinds import SGLANG, SPECULATORS

CPU_KERNELS = Path(paceline.__file__).resolve().parents[2] / "tests/sglang/cpu_kernels"
"""SGLang's kernels in plain torch for machines without a GPU. Only a checkout contains them."""
CONTEXT_MARGIN = 8
"""Positions SGLang keeps free beyond the longest request."""
_ROLES = ("", "prefill_", "decode_", "speculative_draft_")
BACKENDS = tuple(f"{role}attention_backend" for role in _ROLES)
"""SGLang's arguments that name an attention backend."""
KV_MARGIN = 64
"""KV slots that a request needs beyond its tokens, for drafts."""


def check_installed() -> str:
    """SGLang's version.

    Raises ConfigError when SGLang is absent or its release is not RELEASE.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        allowed = "pip install 'paceline[sglang]' on a GPU machine, make setup-sglang on others"
        message, allowed = "engine.kind=sglang needs SGLang", f"{allowed} ({RELEASE})"
        raise ConfigError(message, seen="not installed", allowed=allowed) from None
    if found != RELEASE:
        raise ConfigError("this release of SGLang is not supported", seen=found, allowed=RELEASE)
    return found


def environment(spec: SGLangSpec, *, cuda: bool) -> dict[str, str]:
    """Environment variables for SGLang and its children.

    Raises ConfigError when there is no GPU and the CPU kernels are missing.
    """
    values = {
        "SGLANG_PLUGINS": "paceline",
        # by default SGLang hides NaN logits: a broken policy would still draw, even in a canary
        "SGLANG_SANITIZE_NAN_LOGITS": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not cuda:
        if not CPU_KERNELS.is_dir():
            message = "engine.kind=sglang without a GPU needs the kernels of a checkout"
            allowed = "a machine with a GPU, or git clone and make setup-sglang"
            raise ConfigError(message, seen=f"no {CPU_KERNELS}", allowed=allowed)
        cores = sorted(os.sched_getaffinity(0))
        own = (cores[rank % len(cores)] for rank in range(spec.tensor_parallel_size))
        path = [str(CPU_KERNELS), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        values |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            # compiling SGLang's top-k selection takes seconds, in rounds that the bandit measures
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, own)),
        }

    return values


def arguments(spec: SGLangSpec, *, worker_index: int, cuda: bool) -> dict[str, Any]:
    """Arguments of SGLang's server; `spec.arguments` adds to them and overrides them."""
    context = read_config_json(Path(spec.model_dir))["max_position_embeddings"]
    wanted = spec.max_sequence_tokens + CONTEXT_MARGIN + drafts_reserved(spec)
    port, nccl_port = free_ports(2)
    values: dict[str, Any] = {
        "model_path": spec.model_dir,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "context_length": min(wanted, context),
        "max_running_requests": spec.max_batch,
        "chunked_prefill_size": spec.prefill_tokens,
        "tp_size": spec.tensor_parallel_size,
        "ep_size": spec.expert_parallel_size,
        "random_seed": spec.seed,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "enable_memory_saver": spec.memory_saver,
        "log_level": "warning",
        "port": port,
        "nccl_port": nccl_port,
    }
    if cuda:
        values["mem_fraction_static"] = spec.memory_fraction
        values["base_gpu_id"] = worker_index * spec.tensor_parallel_size
        if spec.memory_saver:
            values |= {"enable_weights_cpu_backup": True, "enable_draft_weights_cpu_backup": True}
    else:  # one attention backend serves every role, so each argument of a backend names it
        values |= {
            "device": "cpu",
            "disable_cuda_graph": True,
            "max_total_tokens": spec.max_batch * (spec.max_sequence_tokens + KV_MARGIN),
            **dict.fromkeys(BACKENDS, "intel_amx"),
        }
    if spec.profile:  # the drafter is not quantized
        values["quantization"] = QUANTIZATION[spec.profile]
        values["speculative_draft_model_quantization"] = "unquant"
    return values | speculation(spec) | spec.arguments


def drafts_reserved(spec: SGLangSpec) -> int:
    """Positions behind a request's tokens that SGLang reserves for the drafts of two rounds.

    SGLang sizes the rows of its slot table for fewer positions. A write past the end of a row would
    reach the next request's row.
    """
    shape = ArmChooser(spec.arm_names, spec.bandit, spec.seed).maximum
    return 2 * max(shape.steps * shape.topk, shape.draft_tokens)


def speculation(spec: SGLangSpec) -> dict[str, Any]:
    """Launch arguments with one shape that covers all arms; empty when only `off` is served."""
    arms = ArmChooser(spec.arm_names, spec.bandit, spec.seed)
    if len(arms.arms) == 1:
        return {}
    shape = arms.maximum
    values: dict[str, Any] = {"algorithm": SGLANG[spec.speculator].algorithm}
    values["num_draft_tokens"] = shape.draft_tokens
    if spec.drafter_dir:
        values |= {"num_steps": shape.steps, "eagle_topk": shape.topk}
        values["draft_model_path"] = spec.drafter_dir
    return {f"speculative_{name}": value for name, value in values.items()}


def complete_drafter(spec: SGLangSpec, folder: Path) -> SGLangSpec:
    """The spec with a drafter directory that SGLang can load.

    A speculator's name becomes a new drafter initialized from the seed, as in the embedded engine.
    A checkpoint without `fc.bias` gets zeros where SGLang's module has this bias, because the
    module would keep random values. A new or changed drafter is written to `folder`. Raises
    ConfigError for an EAGLE with norms of its inputs, which SGLang's module lacks.
    """
    kind = spec.speculator
    if kind not in SGLANG or not SPECULATORS[kind].trained:
        return spec
    from safetensors.torch import save_file

    from paceline.models.loading import read_tensors
    from paceline.speculators.net import trained_net

    given = Path(spec.drafter_dir) if spec.drafter_dir else folder
    if not spec.drafter_dir:
        net = trained_net(kind)
        net.fresh(read_config(Path(spec.model_dir)), net.Options(), spec.seed).save(folder)
    if read_config_json(given).get("norms"):
        message, allowed = "SGLang's EAGLE has no norms", "a drafter trained with norms=false"
        raise ConfigError(f"{message}: {given}", seen="norms=true", allowed=allowed)
    if SGLANG[kind].fc_bias and "fc.bias" not in (tensors := read_tensors(given)):
        weight = tensors["fc.weight"]
        tensors["fc.bias"] = weight.new_zeros(len(weight))
        if given != folder:
            shutil.copy(given / "config.json", folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        given = folder

    return spec.model_copy(update={"drafter": str(given)})


def launch(worker: WorkerSpec, folder: Path) -> None:
    """Start SGLang and return when its schedulers have ended.

    Raises ConfigError for settings or a model that cannot be served.
    """
    check_installed()
    spec = SGLangSpec.model_validate(worker.engine)
    model = read_config(Path(spec.model_dir), experts=True)
    check_experts(model, spec.tensor_parallel_size, spec.expert_parallel_size)
    spec.check_model(model.experts)
    import torch

    cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    complete = complete_drafter(spec, folder)
    if complete != spec:
        # The plugin compares new drafters with the drafter that SGLang loads at its start.
        settings = complete.model_dump(mode="json")
        worker.model_copy(update={"engine": settings}).write(Path(os.environ[SPEC_VARIABLE]))

    values = arguments(complete, worker_index=worker.worker_index, cuda=cuda)
    os.environ |= {PARENT_VARIABLE: str(os.getpid()), **rendezvous(folder, values["nccl_port"])}
    tempfile.tempdir = str(socket_directory())  # SGLang creates its sockets there
    from sglang.srt.entrypoints.engine import Engine

    class SchedulersAlone(Engine):
        """SGLang's engine without its detokenizer process, because the plugin sends the tokens."""

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

    engine = SchedulersAlone(**values)
    tempfile.tempdir = None
    for path in shared_memory():
        sweep_with_us(path)
    engine._scheduler_init_result.block_until_scheduler_exits()
    engine.shutdown()


def rendezvous(folder: Path, nccl_port: int) -> dict[str, str]:
    """Variables that make SGLang's schedulers meet at a file of this user and listen on loopback.

    Address and port only separate the shared memory of its CPU kernels from other engines' memory.
    """
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/store",
        "MASTER_ADDR": loopback().strip("[]"),
        "MASTER_PORT": str(nccl_port),
        **LOOPBACK_ONLY,
    }


def shared_memory() -> list[Path]:
    """Files of /dev/shm that this process and its children have mapped.

    SGLang creates these files, and a kill would leave them. They are matched by inode number,
    because /proc maps list a semaphore under the first name it had.
    """
    folder = Path("/dev/shm")  # noqa: S108
    device = folder.stat().st_dev
    shown = f"{os.major(device):02x}:{os.minor(device):02x}"
    mapped: set[int] = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            fields = (line.split(maxsplit=5) for line in lines)
            mapped |= {int(inode) for _, _, _, place, inode, *_ in fields if place == shown}
    return [Path(entry) for entry in os.scandir(folder) if entry.inode() in mapped]


def main() -> int:
    """Process entry; 0 after Shutdown, 2 for wrong settings."""
    worker = begin()
    spec = SGLangSpec.model_validate(worker.engine)
    if os.environ.get("SGLANG_PLUGINS") != "paceline":
        restart(spec)
    with tempfile.TemporaryDirectory(prefix="sglang-", dir=process_directory()) as folder:
        try:
            launch(worker, Path(folder))
        except PacelineError as error:
            peer = Peer()
            peer.fail(error)
            peer.close()
            return 2
    return 0


def restart(spec: SGLangSpec) -> NoReturn:
    """Replaces this process by one with SGLang's environment.

    The interpreter and torch read PYTHONPATH and thread counts at their start. Setting them in a
    running process would be too late.
    """
    seen = any(Path("/dev").glob("nvidia[0-9]*"))
    cuda = spec.device == "cuda" or (spec.device == "auto" and seen)
    values = {**os.environ, **environment(spec, cuda=cuda)}
    command = [sys.executable, "-m", __spec__.name]
    os.execve(sys.executable, command, values)  # noqa: S606 - no shell is meant


def tie_to_parent() -> None:
    """Ends this process, which SGLang has spawned, together with its parent.

    Exits at once when the parent is already dead. SGLang itself ties its processes only after its
    imports. A host killed before that moment would leave processes that never ended.
    """
    parent = int(os.environ[PARENT_VARIABLE])
    die_with_parent()
    if os.getppid() != parent:  # already dead, perhaps not reaped yet
        raise SystemExit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for processes that this process spawns


if __name__ == "__mp_main__":  # multiprocessing first runs the host's module in a spawned process
    tie_to_parent()
if __name__ == "__main__":
    raise SystemExit(main())
