"""Turns our requests into those that SGLang's scheduler takes."""

from __future__ import annotations

from array import array
from typing import Any

from paceline.services.rollout_gateway.engines.sglang.plugin.tracked import Tracked
from paceline.trajectory import VersionSet


def cache_key(versions: VersionSet) -> str:
    """Namespace of the prefix cache: keys and values of another policy or drafter are never
    reused.
    """
    return str(versions)


def as_sglang_request(tracked: Tracked, key: str) -> Any:
    """TokenizedGenerateReqInput; `key`: its namespace of the prefix cache.

    Draws and stops are ours, so SGLang is told of neither; it keeps the token limit. To it a
    response that goes on is the end of the prompt. Where nothing is generated it draws one token,
    which is not taken: without any it would leave its drafters and CUDA graphs.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = tracked.request
    left = tracked.sequence.token_limit - len(request.response)
    params = SamplingParams(max_new_tokens=max(left, 1), ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=tracked.rid,
        input_text=None,
        input_ids=array("q", request.known),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=key,
    )
