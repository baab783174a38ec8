"""Converts the gateway's requests to requests of SGLang's scheduler."""

from __future__ import annotations

from array import array
from typing import Any

from paceline.services.rollout_gateway.engines.sglang.plugin.tracked import Tracked
from paceline.trajectory import VersionSet


def cache_key(versions: VersionSet) -> str:
    """Namespace of the prefix cache for a version set.

    Keys and values of another policy or drafter are therefore never reused.
    """
    return str(versions)


def as_sglang_request(tracked: Tracked, key: str) -> Any:
    """A TokenizedGenerateReqInput; `key`: its namespace of the prefix cache.

    The plugin draws tokens and applies stop conditions, so SGLang gets only the token limit. SGLang
    treats the start of a continued response as the end of the prompt. A request that generates
    nothing still draws one token, which the plugin drops. Without that token SGLang would bypass
    its drafters and CUDA graphs.
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
