"""What may enter the engine: checks of a request against model and context. Owns no queue."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from rollout_gateway.engines.base import Capability, Request, missing
from rollout_gateway.engines.request_checks import check_request
from rollout_gateway.engines.sequence import RunningSequence, StopText


class Admission:
    """Turns requests into sequences."""

    def __init__(self, config: ModelConfig, model_dir: Path, max_sequence_tokens: int) -> None:
        self.max_sequence_tokens = min(max_sequence_tokens, config.max_position_embeddings)
        self._config = config
        self._tokenizer_path = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def sequence(self, request: Request) -> RunningSequence:
        """A sequence that waits. Raises InvalidInput naming the value that cannot work."""
        check_request(request, self._config.vocab_size, self.max_sequence_tokens)
        prompt, sampling = request.prompt, request.sampling
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        return RunningSequence(
            request=request,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            token_limit=min(sampling.max_tokens, self.max_sequence_tokens - len(prompt)),
            stop_text=StopText(self._load_tokenizer(), sampling.stop) if sampling.stop else None,
            length=len(prompt),
        )

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self._tokenizer_path.is_file():
                raise InvalidInput("stop strings need a tokenizer.json", seen=self._tokenizer_path)
            self._tokenizer = Tokenizer.from_file(str(self._tokenizer_path))
        return self._tokenizer

    @staticmethod
    def check_capture(possible: bool) -> None:
        """Raises MissingCapability when there is nowhere to write hidden rows."""
        if not possible:
            raise missing("embedded", Capability.CAPTURE)
