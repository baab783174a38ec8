"""Sequences for training clients, and their losses by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tinker_loop import MODEL

TEXTS = ("12 and 18 have the divisor 6.", "The sum of 4 and 9 is 13.", "7 is a prime number.")


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def sequences() -> list[list[int]]:
    """Token ids of the texts."""
    return [tokenizer().encode(text, add_special_tokens=False) for text in TEXTS]


def datum(ids: Sequence[int], skipped: int = 3, **inputs: Sequence[float]) -> Any:
    """A sequence, trained behind its first tokens; with `inputs` instead of weights if given."""
    import tinker

    count = len(ids) - 1
    weights = [0.0] * skipped + [1.0] * (count - skipped)
    given: dict[str, Any] = {"target_tokens": list(ids[1:]), **(inputs or {"weights": weights})}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=given
    )


def plain_model() -> Any:
    """The start policy by transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def plain_logprobs(model: Any, ids: Sequence[int]) -> Tensor:
    """Log-probs of the tokens behind the first one."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def logprobs_of(result: Any) -> list[list[float]]:
    """Log-probs of each sequence in a result."""
    return [list(one["logprobs"].data) for one in result.loss_fn_outputs]
