"""Runs each decode round of SGLang with the chosen arm: hooks on its speculative workers and
results.

Rank 0 chooses the arm, and the other ranks follow. arms.py makes the choice; runtimes.py holds the
data of each shape. On a CPU, the duration of a round is the wall clock around it. On a GPU, two
events on the forward stream bracket the round. They are read when SGLang has waited for the round's
result anyway, so the measurement never waits for the device.
"""

import time
from typing import Any

import torch

from paceline.arm_names import OFF
from paceline.services.rollout_gateway.engines.sglang.plugin import arms, runtimes
from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import read_on

RUNTIMES = "paceline_runtimes"
"""Attribute of a speculative worker that holds its Runtimes."""
ROUND = "paceline_round"
"""Attribute of a result that holds its RunningRound."""


class RunningRound:
    """Plan of a round, and its seconds, which are available once its result is on the host."""

    def __init__(self, plan: arms.ChosenArm, device: str) -> None:
        self.plan = plan
        self._events: list[Any] = []
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = 0.0
        self._mark()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop once the round's work is done (CPU) or queued (GPU)."""
        self._seconds = time.perf_counter() - self._started
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    @property
    def seconds(self) -> float:
        """Seconds from start to stop."""
        if self._cuda:
            begin, end = self._events
            return float(begin.elapsed_time(end)) / 1000
        return self._seconds


def prepare_eagle(plugin: Any, original: Any, worker: Any) -> None:
    """AROUND EAGLEWorkerV2.init_cuda_graphs: build the runtime values of every arm."""
    original(worker)
    setattr(worker, RUNTIMES, runtimes.eagle_runtimes(worker, plugin.arms))


def prepare_ngram(plugin: Any, original: Any, worker: Any) -> None:
    """AROUND NGRAMWorker.init_cuda_graphs: build the runtime values of every arm."""
    original(worker)
    setattr(worker, RUNTIMES, runtimes.ngram_runtimes(worker, plugin.arms))


def eagle_round(
    plugin: Any, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND EAGLEWorkerV2.forward_batch_generation: draft, verify and catch up with the round's
    arm.

    With steps 0 SGLang verifies the root alone. Where states are kept, the drafter reads them
    before the next round that drafts. That time is outside the round's seconds, so earlier rounds
    do not change an arm's result.
    """
    if not batch.forward_mode.is_decode() or batch.is_extend_in_batch:
        if plugin.slot_rows is not None and not batch.forward_mode.is_idle():
            plugin.unread.prefilled(batch)
        return original(worker, batch, *args, **kwargs)
    plan = _plan(plugin, batch)
    if plan.arm.drafted:
        read_on(plugin, worker, batch)
    elif plugin.slot_rows is not None:
        plugin.unread.leave(batch)
    proposals, topk = batch.spec_info, plan.arm.shape.topk
    if plan.arm.drafted and proposals.topk_p.shape[1] > topk:
        # the arm's part of the initial proposals, [B, launch topk] by falling probability
        proposals.topk_p = proposals.topk_p[:, :topk].contiguous()
        proposals.topk_index = proposals.topk_index[:, :topk].contiguous()
    return _run(plugin, plan, original, worker, batch, *args, **kwargs)


def eagle_catch_up(
    plugin: Any, original: Any, drafter: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND EagleDraftWorker._draft_extend_for_decode: propose for the next round, at launch
    width.

    An `off` round with kept states proposes nothing. Batches merge a round's proposals with a
    prefill's proposals, and the next round may be wider than this round.
    """
    if plugin.arm == OFF and plugin.slot_rows is not None:
        plugin.unread.hand_on(result.next_draft_input)
        return
    with runtimes.swapped(drafter, "topk", plugin.arms.maximum.topk):
        original(drafter, batch, result, *args, **kwargs)


def ngram_round(
    plugin: Any, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND NGRAMWorker.forward_batch_generation: look up and verify with the round's arm."""
    if not batch.forward_mode.is_decode():
        return original(worker, batch, *args, **kwargs)
    plan = _plan(plugin, batch)
    result = _run(plugin, plan, original, worker, batch, *args, **kwargs)
    _widen(result.next_draft_input, plan.arm.shape.draft_tokens, worker.draft_token_num)
    return result


def ngram_drafts(plugin: Any, original: Any, worker: Any, batch: Any) -> Any:
    """AROUND NGRAMWorker._prepare_draft_tokens: cut trees of launch size to the round's size."""
    kept, nodes = worker.draft_token_num, plugin.arms.maximum.draft_tokens
    with runtimes.swapped(worker, "draft_token_num", nodes):
        drafts, mask = original(worker, batch)
    return (drafts, mask) if kept == nodes else arms.first_nodes(drafts, mask, nodes, kept)


def ngram_learn(plugin: Any, original: Any, worker: Any, batch: Any) -> None:
    """AROUND NGRAMWorker._update_ngram_corpus: read the previous round's tokens at launch width."""
    with runtimes.swapped(worker, "draft_token_num", plugin.arms.maximum.draft_tokens):
        original(worker, batch)


def tokens_resolved(plugin: Any, original: Any, processor: Any, result: Any, batch: Any) -> Any:
    """AROUND SchedulerBatchResultProcessor._resolve_spec_v2_tokens: report the round to the bandit.

    The accept lengths are on the host by then.
    """
    going = [not (req.finished() or req.is_retracted) for req in batch.reqs]
    tokens = original(processor, result, batch)
    done: RunningRound | None = getattr(result, ROUND, None)
    if done is not None and any(going):
        taken = [len(row) if counts else 0 for row, counts in zip(tokens, going, strict=True)]
        plugin.arms.observe(done.plan, taken, done.seconds)
    return tokens


def row_advanced(plugin: Any, original: Any, processor: Any, req: Any, *args: Any) -> None:
    """AROUND SchedulerBatchResultProcessor._handle_finish_state_updated_req: count a request's
    round.

    SGLang calls this for each row of a decode round, drafted or not. By then the row's end is
    determined, and no result of the row has been sent.
    """
    _, result, row, _ = args  # batch, result, row, output of the logits
    tracked = plugin.requests.get(req.rid)
    if tracked is not None:
        done: RunningRound | None = getattr(result, ROUND, None)
        accepted = 1 if result.accept_lens is None else int(result.accept_lens[row])
        taken = arms.taken_tokens(accepted, len(req.output_ids), req.finished_len)
        arm = done.plan.arm if done is not None else plugin.arms.arms[OFF]
        counts = (arm.drafted, taken, arm.shape.steps)
        tracked.sequence.count(arm.name, *counts, trained=arms.trained(arm))

    original(processor, req, *args)


def _plan(plugin: Any, batch: Any) -> arms.ChosenArm:
    """The round's plan, with the same arm on every rank; only the choosing rank learns from it."""
    chooser, group, plan = plugin.arms, plugin.tp_group, None
    if plugin.rank == 0:
        tracked = [plugin.requests.get(req.rid) for req in batch.reqs]
        plan = chooser.choose(chooser.forced, tracked, plugin.versions.drafter)
    if group is not None:
        names = tuple(chooser.arms)
        choice = torch.tensor([names.index(plan.arm.name) if plan else -1])
        torch.distributed.broadcast(choice, src=group.first_rank, group=group.cpu_group)
        arm = chooser.arms[names[int(choice)]]
        plan = plan or arms.ChosenArm(arm, explored=False, teaches=False, era=0)
    assert plan is not None
    return plan


def _run(
    plugin: Any, plan: arms.ChosenArm, original: Any, worker: Any, *args: Any, **kwargs: Any
) -> Any:
    prepared: runtimes.Runtimes = getattr(worker, RUNTIMES)
    running = RunningRound(plan, worker.device)
    with prepared.serving(plan.arm), runtimes.swapped(plugin, "arm", plan.arm.name):
        result = original(worker, *args, **kwargs)
    running.stop()
    setattr(result, ROUND, running)
    return result


def _widen(draft_input: Any, width: int, launch: int) -> None:
    """Pad accepted tokens [B * width] to rows of launch width, which merging batches needs."""
    if width == launch:
        return
    tokens = draft_input.accept_tokens.view(-1, width)
    draft_input.accept_tokens = torch.nn.functional.pad(tokens, (0, launch - width)).flatten()
    draft_input.draft_token_num = draft_input.num_tokens_per_req = launch
    draft_input.num_tokens_for_logprob_per_req = launch
