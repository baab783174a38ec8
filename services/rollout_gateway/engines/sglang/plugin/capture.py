"""Captures hidden rows and log-probs of prompts inside SGLang's scheduler process.

SGLang's own prompt log-probs include neither temperature nor rank, and requesting them bypasses the
plugin's draws. A scored request shares no prefix with other requests. All its states are therefore
computed here, in the chunks of its prefill.

Every forward of the target stores its rows under the KV slots of its tokens. When a request ends,
the rows of its whole sequence are read through its slots. A prefix from the cache therefore loses
no rows. Row i is the state at token i; the last token was never forwarded and has no row. This
module owns neither the ring nor the choice of captured requests.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.arm_names import OFF
from paceline.errors import ConfigError
from paceline.models import loading
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.requests.draws import score_prompt
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import trained
from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import MB, Gathered, SlotRows
from paceline.speculators.kinds import INNER_STATES
from paceline.telemetry import get_logger


def score_prompts(
    plugin: Any, processor: Any, hidden_states: Tensor, lm_head: Any, logits_metadata: Any
) -> None:
    """Score the prompts in a prefill of the target, for requests with prompt log-probs.

    hidden_states [N, H]: states of all tokens of the batch, perhaps followed by padding. Every rank
    computes the scores, because each rank holds only its part of the head.
    """
    batch = plugin.batch
    if batch is None or not batch.forward_mode.is_extend_without_speculative():
        return
    tracked = [plugin.requests.get(req.rid) for req in batch.reqs]
    if not any(one is not None and one.sequence.scoring for one in tracked):
        return
    from sglang.srt.layers.logits_processor import LogitsMetadata
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    if isinstance(logits_metadata, ForwardBatch):
        logits_metadata = LogitsMetadata.from_forward_batch(logits_metadata)
    about = {"lm_head": lm_head, "logits_metadata": logits_metadata}
    head = partial(processor._get_logits, **about, use_logits_buffer=False)
    states = hidden_states[: sum(batch.extend_lens)].split(batch.extend_lens)
    for one, first, rows in zip(tracked, batch.prefix_lens, states, strict=True):
        if one is not None and one.sequence.scoring:
            score_prompt(head, one.sequence, first, rows)


_TARGET = "paceline_adds_last"  # marks the target's LogitsProcessor, not the drafter's
# on a LogitsProcessorOutput: rows of all captured states, where SGLang's own field has fewer
_ROWS = "paceline_rows"

log = get_logger(__name__)


# ---- setup


def start(plugin: Any) -> None:
    """Create the row store once the scheduler has its KV pool.

    Rank 0 sends rows to the ring; other ranks store rows only where a drafter reads them. Raises
    ConfigError when the model captures other layers than declared, or has no room for the rows.
    """
    if plugin.rows is None:
        return
    model = plugin.scheduler.tp_worker.model_runner.model
    wanted, captured = list(plugin.rows.inner), list(getattr(model.model, "layers_to_capture", []))
    if wanted != captured:
        message = "SGLang captures other layers than the rows declare"
        raise ConfigError(message, seen=captured, allowed=wanted)

    if plugin.ring is None and not any(map(trained, plugin.arms.arms.values())):
        return
    pool = plugin.scheduler.token_to_kv_pool_allocator
    dtype, device = loading.DTYPES[plugin.spec.features_dtype], torch.device(pool.device)
    plugin.slot_rows = SlotRows(pool.size + pool.page_size, plugin.rows.width, dtype, device)
    log.info("hidden rows by KV slot", megabytes=round(plugin.slot_rows.nbytes / MB, 1))


# ---- rows in


def full_rows(plugin: Any, original: Any) -> Any:
    """AROUND get_server_return_hidden_states_mode: return all rows of every target forward.

    The mode does not depend on requests. It is fixed for the engine's life, because CUDA graphs are
    recorded with it.
    """
    if plugin.rows is None:
        return original()
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    return CaptureHiddenMode.FULL


def model_loaded(plugin: Any, result: None, runner: Any) -> None:
    """AFTER ModelRunner.load_model: make the target return its inner states too, with any
    speculator.
    """
    if runner.is_draft_worker or plugin.rows is None or not (layers := plugin.rows.inner):
        return
    runner.model.set_eagle3_layers_to_capture([layer - 1 for layer in layers])
    setattr(runner.model.logits_processor, _TARGET, True)


def add_last(
    plugin: Any,
    original: Any,
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND LogitsProcessor.forward: append the last state to the inner states, also in CUDA
    graphs.

    Before that, score the prompts of a prefill.
    """
    score_prompts(plugin, processor, hidden_states, lm_head, logits_metadata)
    if aux_hidden_states is not None and getattr(processor, _TARGET, False):
        if isinstance(aux_hidden_states, Tensor):
            aux_hidden_states = torch.cat((aux_hidden_states, hidden_states), dim=-1)
        else:
            aux_hidden_states = [*aux_hidden_states, hidden_states]

    given = (input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states)
    return original(processor, *given, *args, **kwargs)


def forwarded(
    plugin: Any, original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ModelRunner.forward: store rows of a prefill, a prefill chunk, or a round without
    drafts.
    """
    if runner.is_draft_worker or plugin.rows is None:
        return original(runner, forward_batch, *args, **kwargs)
    # Read before the call, which may pad these tensors.
    slots, tokens = forward_batch.out_cache_loc, forward_batch.input_ids
    positions = forward_batch.positions
    output = original(runner, forward_batch, *args, **kwargs)
    if plugin.rows.inner:
        _part_from_last(plugin.rows, output.logits_output)
    mode = forward_batch.forward_mode
    stored = plugin.slot_rows
    if stored is None or not (mode.is_decode() or mode.is_extend_without_speculative()):
        return output
    rows = _rows_of(output.logits_output)
    if rows is None or len(rows) != len(slots):
        stored.forget(slots)  # not one row per token: no rows are better than shifted rows
    else:
        stored.put(slots, tokens, positions, plugin.versions.policy, rows)

    return output


def verified(
    plugin: Any,
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    predict: Tensor,
    accept_lens: Tensor,
    accept_index: Tensor,
) -> None:
    """Store the rows of the accepted nodes of every tree.

    accept_index [B, D]: global nodes of each path; accept_lens [B]: nodes that count, the root
    included. SGLang later moves a path's KV to the front of its request's block. The row of step j
    therefore belongs to slot j of the block.
    """
    stored = plugin.slot_rows
    if stored is None or batch.forward_mode.is_idle():
        return
    nodes = verify_input.draft_token_num
    slots = batch.out_cache_loc.view(-1, nodes)
    rows = _rows_of(logits_output)
    if rows is None or len(rows) != slots.numel():
        stored.forget(slots.flatten())
        return
    depth = min(accept_index.shape[1], nodes)
    steps = torch.arange(depth, device=slots.device)
    accepted = steps < accept_lens[:, None]
    slots = torch.where(accepted, slots[:, :depth], stored.unused_slot).flatten()
    chosen = accept_index[:, :depth].clamp(min=0).flatten().long()
    tokens, positions = verify_input.draft_token.flatten()[chosen], verify_input.positions[chosen]
    unread = plugin.arm == OFF
    stored.put(slots, tokens, positions, plugin.versions.policy, rows[chosen], unread=unread)


def _part_from_last(layout: RowLayout, logits_output: Any) -> None:
    """Restore SGLang's own field to the inner states alone, as its drafter expects."""
    rows = getattr(logits_output, "hidden_states", None)
    if rows is not None and rows.shape[-1] == layout.width:
        setattr(logits_output, _ROWS, rows)
        inner = layout.width * INNER_STATES // (INNER_STATES + 1)
        logits_output.hidden_states = rows[:, :inner].contiguous()


def _rows_of(logits_output: Any) -> Tensor | None:
    rows: Tensor | None = getattr(logits_output, _ROWS, None)
    return rows if rows is not None else getattr(logits_output, "hidden_states", None)


# ---- rows out


def released(plugin: Any, req: Any, tree_cache: Any, *_: Any, **__: Any) -> None:
    """BEFORE release_kv_cache: start copying an ended request's rows while it still owns its slots.

    SGLang also calls this for a retracted request. That request is computed again, so no rows are
    sent.
    """
    stored = plugin.slot_rows
    if stored is None or plugin.ring is None or not req.finished() or not req.kv.holds_kv:
        return
    tracked = plugin.requests.get(req.rid)
    if tracked is None or not tracked.request.capture:
        return
    ids = np.concatenate((req.origin_input_ids, req.output_ids_through_stop)).astype(np.int32)
    count = min(len(ids) - 1, req.kv.kv_committed_len)
    # Without enough room the first rows are dropped: a drafter learns from the response.
    first = max(0, count - stored.room())
    stored.rows_dropped += first
    if first < count:
        slots = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, first:count]
        gathered = stored.gather(slots, ids[first:count], first)
        stored.leaving.append((tracked.request.request_id, gathered))

    drain(plugin)


def drain(plugin: Any) -> None:
    """Write the rows that have arrived on the host to the ring. Never waits; call it between
    rounds.
    """
    stored = plugin.slot_rows
    while stored is not None and stored.leaving and stored.leaving[0][1].done:
        _write(plugin, *stored.leaving.popleft())


def _write(plugin: Any, request_id: int, gathered: Gathered) -> None:
    """Write valid rows to the ring, in one call per policy version, and count the invalid rows."""
    hidden, valid, versions = gathered.result()
    plugin.rows_invalid += len(valid) - int(valid.sum())
    ring = plugin.ring
    if ring is None:
        return
    positions = gathered.first + np.arange(len(valid), dtype=np.uint32)
    for version in np.unique(versions[valid]):
        chosen = valid & (versions == version)
        ids = np.full(int(chosen.sum()), request_id, dtype=np.uint64)
        tokens = gathered.token_ids[chosen].astype(np.uint32)
        ring.write(ids, positions[chosen].astype(np.uint32), tokens, int(version), hidden[chosen])
