"""Holds the state of SGLang's workers for each arm: one set of values per arm, built at start.

SGLang keeps a shape in attributes of its workers and model runners: numbers, attention backends,
CUDA graphs. A set is built as SGLang's own switch of steps builds it (SpecRuntimeState), with topk
beside steps and draft tokens. A decode round installs its set and removes it afterwards, so prefill
and the scheduler always see the launch shape. arms.py chooses the arm.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.arm_names import ArmName, TreeSize
from paceline.errors import ConfigError
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import ArmChooser

Slot = tuple[Any, str]
"""An object and the name of one of its attributes."""


@dataclass(frozen=True, slots=True)
class Runtimes:
    """Values of the slots at the launch and for every arm."""

    slots: Sequence[Slot]
    launch: Sequence[Any]
    arms: Mapping[str, Sequence[Any]]

    @contextmanager
    def serving(self, arm: ArmName) -> Iterator[None]:
        """Install the arm's values inside the context, and the launch's values afterwards."""
        write_slots(self.slots, self.arms[arm.name])
        try:
            yield
        finally:
            write_slots(self.slots, self.launch)


def read_slots(slots: Sequence[Slot]) -> list[Any]:
    """The slots' present values."""
    return [getattr(owner, name) for owner, name in slots]


def write_slots(slots: Sequence[Slot], values: Sequence[Any]) -> None:
    """Write a value into each slot."""
    for (owner, name), value in zip(slots, values, strict=True):
        setattr(owner, name, value)


def eagle_runtimes(worker: Any, arms: ArmChooser) -> Runtimes:
    """Build one set per arm for an EAGLEWorkerV2 that has already built its own graphs.

    Raises ConfigError when SGLang was launched with another shape or with settings that break a
    switch.
    """
    from sglang.srt.environ import envs

    if envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get():
        message = "SGLang would draft from states that its drafter never read"
        seen = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND=1"
        raise ConfigError(message, seen=seen, allowed="not set")

    if worker.adaptive_controller is not None:
        message = "our bandit chooses the steps"
        raise ConfigError(message, seen="speculative_adaptive=True", allowed=False)

    steps, tokens = worker.speculative_num_steps, worker.speculative_num_draft_tokens
    shaping = partial(_shape_eagle, worker)
    with drafting():
        return _runtimes(TreeSize(steps, worker.topk, tokens), arms, _eagle_slots(worker), shaping)


Shaping = Callable[[TreeSize], None]


def _runtimes(
    launch_shape: TreeSize, arms: ArmChooser, slots: Sequence[Slot], shape_worker: Shaping
) -> Runtimes:
    """Values of every arm; the worker takes on one arm's shape after another."""
    if launch_shape != arms.maximum:
        message = "SGLang was launched with a shape that is not the arms' maximum"
        raise ConfigError(message, seen=launch_shape, allowed=arms.maximum)

    launch, sets = read_slots(slots), {}
    try:
        for arm in arms.arms.values():
            write_slots(slots, launch)
            if arm.shape != launch_shape:
                shape_worker(arm.shape)
            sets[arm.name] = read_slots(slots)
    finally:
        write_slots(slots, launch)
    return Runtimes(slots, launch, sets)


def _eagle_slots(worker: Any) -> list[Slot]:
    drafter = worker._draft_worker
    numbers = ("topk", "speculative_num_steps", "speculative_num_draft_tokens")
    backends = ("draft_attn_backend", "draft_extend_attn_backend")
    graphs = ("cuda_graph_runner", "cuda_graph_runner_for_draft_extend")
    chains = ("_topk1_parents_prealloc", "_topk1_score_indices_prealloc")
    slots = [(worker, name) for name in numbers]
    slots += [(drafter, name) for name in (*numbers, *backends, *graphs, *chains)]
    slots += [(drafter.draft_runner, name) for name in ("draft_attn_backend", "attn_backend")]
    return slots + _target_slots(worker)


def _target_slots(worker: Any) -> list[Slot]:
    runner = worker._target_worker.model_runner
    return [(runner, name) for name in ("attn_backend", "decode_cuda_graph_runner")]


def _shape_eagle(worker: Any, shape: TreeSize) -> None:
    """Set the workers up for a shape."""
    drafter = worker._draft_worker
    for one in (worker, drafter):
        one.topk = shape.topk
        one.speculative_num_steps = shape.steps
        one.speculative_num_draft_tokens = shape.draft_tokens

    with _published(speculative_eagle_topk=shape.topk):
        state = worker.build_adaptive_runtime_state(shape.steps, shape.draft_tokens)
    drafter.draft_attn_backend = drafter.draft_runner.draft_attn_backend = state.draft_attn_backend
    drafter.draft_extend_attn_backend = state.draft_extend_attn_backend
    if state.draft_extend_attn_backend is not None:
        drafter.draft_runner.attn_backend = state.draft_extend_attn_backend
    drafter.cuda_graph_runner = state.cuda_graph_runner
    drafter.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend
    drafter._rebuild_topk1_chain_buffers()
    runner = worker._target_worker.model_runner
    runner.attn_backend = state.target_attn_backend
    runner.decode_cuda_graph_runner = state.target_graph_runner


def ngram_runtimes(worker: Any, arms: ArmChooser) -> Runtimes:
    """Build one set per arm for an NGRAMWorker.

    The corpus always gives trees of the launch's size, and a round uses their first nodes. Raises
    ConfigError when SGLang was launched with another number of draft tokens.
    """
    tokens = worker.draft_token_num
    numbers = ("draft_token_num", "speculative_num_draft_tokens")
    lists = ("retrieve_indexes", "retrieve_next_token", "retrieve_next_sibling")
    buffers = ("draft_tokens", "tree_mask", "positions", *lists)
    names = (*numbers, *buffers, *(f"{name}_batch" for name in buffers))
    slots = [*((worker, name) for name in names), *_target_slots(worker)]
    shape = TreeSize(steps=tokens - 1, topk=1, draft_tokens=tokens)
    return _runtimes(shape, arms, slots, partial(_shape_ngram, worker))


def _shape_ngram(worker: Any, shape: TreeSize) -> None:
    """Set up the worker's buffers, attention backend and graph for trees of this size."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

    draft_tokens = shape.draft_tokens
    worker.draft_token_num = worker.speculative_num_draft_tokens = draft_tokens
    worker._init_preallocated_tensors()
    runner = worker._target_worker.model_runner
    with _published(speculative_num_draft_tokens=draft_tokens):
        with swapped(runner, "init_new_workspace", runner.init_new_workspace):
            runner.attn_backend = runner._get_attention_backend(init_new_workspace=True)
        if not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            runner.decode_cuda_graph_runner = DecodeCudaGraphRunner(
                runner, attn_backend=runner.attn_backend, speculative_num_draft_tokens=draft_tokens
            )


@contextmanager
def drafting() -> Iterator[None]:
    """The contexts in which SGLang itself calls its drafter and builds its graphs."""
    from sglang.srt.layers.moe import utils

    with utils.speculative_moe_backend_context(), utils.speculative_moe_a2a_backend_context():
        yield


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _published(**values: int) -> Iterator[None]:
    """Change SGLang's settings inside the context; new backends and graphs read them there."""
    from sglang.srt.runtime_context import get_context, get_spec

    before = {name: getattr(get_spec(), name) for name in values}
    get_context().override("paceline.arms", **values)
    try:
        yield
    finally:
        get_context().override("paceline.arms", **before)
