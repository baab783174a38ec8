"""Our requests as SGLang's scheduler takes them. Owns the translation, no queue."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from paceline.trajectory import VersionSet
from rollout_gateway.engines.base import Request
from rollout_gateway.engines.request_checks import check_request
from rollout_gateway.engines.sequence import RunningSequence, StopText
from rollout_gateway.engines.sglang.plugin.tracked import Tracked, rid_of


class Admission:
    """Which requests are served, and when each ends: stops are ours, so both engines end at the same token."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], max_sequence_tokens: int, model_dir: str
    ) -> None:
        self.vocab_size = vocab_size
        self.max_sequence_tokens = max_sequence_tokens
        self._eos = eos_token_ids
        self._tokenizer_path = Path(model_dir) / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, config: ModelConfig, max_sequence_tokens: int, model_dir: str) -> Admission:
        """For a served model."""
        return cls(config.vocab_size, config.eos_token_ids, max_sequence_tokens, model_dir)

    def tracked(self, request: Request, versions: VersionSet) -> Tracked:
        """A request to follow. Raises InvalidInput naming the value that cannot work."""
        check_request(request, self.vocab_size, self.max_sequence_tokens)
        sampling = request.sampling
        stops = (*(() if sampling.ignore_eos else self._eos), *sampling.stop_token_ids)
        room = self.max_sequence_tokens - len(request.prompt)
        text = StopText(self._load_tokenizer(), sampling.stop) if sampling.stop else None
        sequence = RunningSequence(
            request, frozenset(stops), min(sampling.max_tokens, room), text, length=len(request.prompt)
        )
        return Tracked(sequence, versions.drafter)

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self._tokenizer_path.is_file():
                raise InvalidInput("stop strings need a tokenizer.json", seen=self._tokenizer_path)
            self._tokenizer = Tokenizer.from_file(str(self._tokenizer_path))
        return self._tokenizer


def cache_key(versions: VersionSet) -> str:
    """Namespace of the prefix cache: keys and values of another policy or drafter are never reused."""
    return f"p{versions.policy}.d{versions.drafter}"


def as_sglang_request(tracked: Tracked, versions: VersionSet) -> Any:
    """TokenizedGenerateReqInput. Draws and stops are ours, so SGLang is told of neither; it keeps the token limit."""
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
