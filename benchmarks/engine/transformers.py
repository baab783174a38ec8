"""The other side of the comparison: transformers' generate, greedy, on the engine's requests.

Owns padding and what transformers is told; its own speculation is prompt lookup (Saxena 2023) and
assisted generation (Leviathan et al. 2023), both with the library's settings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.engine.runs import Answer, Run, Workload
from paceline.errors import InvalidInput
from paceline.models.loading import DTYPES
from rollout_gateway.engines.nouns import Request

PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 10}
"""The length transformers' documentation uses."""


class TransformersModel:
    """One checkpoint in transformers."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[dtype]
        ).eval()
        config = self.model.generation_config
        ends = config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._pad = config.pad_token_id if config.pad_token_id is not None else min(self._ends)

    @torch.inference_mode()
    def generate(self, work: Workload, threads: int, how: Mapping[str, Any] | None = None) -> Run:
        """Each wave as one left-padded batch.

        Raises InvalidInput for requests that are not greedy.
        """
        for request in work.requests:
            if request.sampling.temperature:
                raise InvalidInput(
                    "only greedy decoding gives both sides the same tokens",
                    seen=request.sampling.temperature,
                    allowed="temperature 0",
                )
        torch.set_num_threads(threads)
        answers: list[Answer] = []
        began = time.perf_counter()
        for wave in work.waves:
            answers += self._wave(wave, dict(how or {}))
        return Run(time.perf_counter() - began, tuple(answers))

    def _wave(self, wave: Sequence[Request], how: dict[str, Any]) -> list[Answer]:
        width = max(len(request.prompt) for request in wave)
        padding = [width - len(request.prompt) for request in wave]
        rows = [
            [self._pad] * pad + list(request.prompt)
            for pad, request in zip(padding, wave, strict=True)
        ]
        seen = [[0] * pad + [1] * (width - pad) for pad in padding]
        out = self.model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(seen),
            max_new_tokens=wave[0].sampling.max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
            **how,
        )
        return [Answer(self._until_end(row)) for row in out[:, width:].tolist()]

    def _until_end(self, row: list[int]) -> tuple[int, ...]:
        end = next((index + 1 for index, token in enumerate(row) if token in self._ends), len(row))
        return tuple(row[:end])
