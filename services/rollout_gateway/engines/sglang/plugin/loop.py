"""Hooks SGLang's scheduler loop: start, incoming commands, finish rule, outgoing chunks.

This module defines only the order; the rules are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.services.rollout_gateway.engines.nouns import Finish
from paceline.services.rollout_gateway.engines.sglang.plugin.commands import obey
from paceline.services.rollout_gateway.engines.sglang.plugin.process import Plugin
from paceline.services.rollout_gateway.engines.sglang.plugin.runtimes import swapped
from paceline.services.rollout_gateway.engines.sglang.plugin.tracked import RID_PREFIX


def received(plugin: Plugin, original: Callable[[Any], Any], receiver: Any) -> Any:
    """AROUND SchedulerRequestReceiver._pull_raw_reqs: add the gateway's commands to SGLang's
    requests.

    SGLang then passes both to every rank.
    """
    if plugin.peer is None:
        return original(receiver)
    commands = plugin.between_rounds([receiver.recv_from_tokenizer, receiver.recv_from_rpc])
    return [*original(receiver), *commands]


def processed(
    plugin: Plugin, original: Callable[[Any, Any], Any], scheduler: Any, recv_reqs: Sequence[Any]
) -> Any:
    """AROUND Scheduler.process_input_requests: execute commands (bytes), and leave the rest to
    SGLang.
    """
    for payload in recv_reqs:
        if isinstance(payload, bytes):
            obey(plugin, payload)
    return original(scheduler, [one for one in recv_reqs if not isinstance(one, bytes)])


def forwarding(
    plugin: Plugin, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation: record the target's batch for the sampler."""
    if worker.is_draft_worker or batch is None:
        return original(worker, batch, *args, **kwargs)
    with swapped(plugin, "batch", batch):
        return original(worker, batch, *args, **kwargs)


def finishing(
    plugin: Plugin, original: Callable[..., Any], req: Any, new_accepted_len: int = 1
) -> None:
    """AROUND Req.update_finish_state: end the gateway's requests by the embedded engine's rule."""
    tracked = plugin.requests.get(req.rid)
    if tracked is None or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    plugin.settle()
    tracked.sequence.copied = req.cached_tokens
    if tracked.sequence.error:  # its grammar failed: draws since then are not reported
        tracked.sequence.finish = Finish.ERROR
    else:
        tracked.sequence.end_scored()
        if tracked.sequence.finish is None:
            plugin.take(tracked, req.output_ids)
    finish = tracked.sequence.finish
    if finish is None:
        return
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN

    req.finished_len = len(tracked.sequence.tokens) - len(tracked.request.response)
    if finish in (Finish.LENGTH, Finish.ERROR):
        req.finished_reason = FINISH_LENGTH(length=req.finished_len)
    else:
        req.finished_reason = FINISH_MATCHED_TOKEN(matched=tracked.sequence.tokens[-1])


def streaming(
    plugin: Plugin,
    original: Callable[..., Any],
    streamer: Any,
    reqs: Sequence[Any],
    return_logprob: bool,
    skip_req: Any = None,
    is_idle_batch: bool = False,
) -> Any:
    """AROUND _stream_output_generation: send chunks of the gateway's requests to the gateway.

    SGLang's tokenizer gets only results of SGLang's own requests.
    """
    for req in reqs:
        if req.rid.startswith(RID_PREFIX) and req is not skip_req:
            _stream_one(plugin, req)
    foreign = [req for req in reqs if not req.rid.startswith(RID_PREFIX)]
    return original(streamer, foreign, return_logprob, skip_req, is_idle_batch)


def _stream_one(plugin: Plugin, req: Any) -> None:
    tracked = plugin.requests.get(req.rid)
    if req.finished():
        req.finished_output = True
    if tracked is None:
        return
    tracked.sequence.copied = req.cached_tokens
    if not req.finished():
        if tracked.request.stream and len(tracked.sequence.tokens) > tracked.sequence.told:
            plugin.tell([tracked.sequence.chunk()])
        return

    if tracked.sequence.finish is not None:
        plugin.end(req.rid)
    else:
        plugin.end(
            req.rid,
            Finish.ERROR,
            f"RESOURCE_EXHAUSTED: SGLang ended the request: {req.finished_reason.to_json()}",
        )


def start(plugin: Plugin, scheduler: Any) -> None:
    """BEFORE Scheduler.run_event_loop: start the plugin."""
    plugin.start(scheduler)
