"""Computes log-probs of prompts inside SGLang's scheduler process.

SGLang's own prompt log-probs include neither temperature nor rank, and requesting them bypasses the
plugin's draws. A scored request shares no prefix with other requests. All its states are therefore
computed here, in the chunks of its prefill.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from paceline.services.rollout_gateway.engines.requests.prompt_scores import score_prompt


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
    head = partial(
        processor._get_logits,
        lm_head=lm_head,
        logits_metadata=logits_metadata,
        use_logits_buffer=False,
    )
    states = hidden_states[: sum(batch.extend_lens)].split(batch.extend_lens)
    for one, first, rows in zip(tracked, batch.prefix_lens, states, strict=True):
        if one is not None and one.sequence.scoring:
            score_prompt(head, one.sequence, first, rows)
