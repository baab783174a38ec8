"""Turns our requests into those that SGLang's scheduler takes."""

from __future__ import annotations

from array import array
from typing import Any

from paceline.trajectory import VersionSet
from rollout_gateway.engines.sglang.plugin.tracked import Tracked, rid_of


def cache_key(versions: VersionSet) -> str:
    """Namespace of the prefix cache: keys and values of another policy or drafter are never
    reused.
    """
    return f"p{versions.policy}.d{versions.drafter}"


def as_sglang_request(tracked: Tracked, versions: VersionSet) -> Any:
    """TokenizedGenerateReqInput.

    Draws and stops are ours, so SGLang is told of neither; it keeps the token limit.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=tracked.sequence.token_limit, ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid_of(tracked.request.request_id),
        input_text=None,
        input_ids=array("q", tracked.request.prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=cache_key(versions),
    )
