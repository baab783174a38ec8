"""Log-probs of prompts inside SGLang's scheduler process.

SGLang's own are not told: they know neither temperature nor rank, and who asks for them is led
around our draws. A request whose prompt is scored shares no prefix with others, so that the states
of all its tokens pass here, in the pieces of its prefill.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from paceline.services.rollout_gateway.engines.requests.prompt_scores import score_prompt


def score_prompts(
    plugin: Any, processor: Any, hidden_states: Tensor, lm_head: Any, logits_metadata: Any
) -> None:
    """Of the requests in a prefill of the target that ask for it.

    hidden_states [N, H]: of all tokens of the batch, perhaps with padding behind them. Every rank
    computes the scores, since each has but its part of the head.
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
