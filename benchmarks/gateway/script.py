"""What every backend of the gateway's bench says, and how fast.

Owns the texts and the files of the scripted engine.
"""

from __future__ import annotations

import codecs
import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sglang import demo_folder

MODEL = "bench-model"
TEXTS = 8
LETTERS = "etaoin shrdlu ETAOIN äöß – 数学"
MAX_BATCH = 1024
MAX_SEQUENCE_TOKENS = 1 << 16
EOS = 1


@dataclass(frozen=True, slots=True)
class Pace:
    """Mean tokens of a response, tokens of a chunk, seconds of a round; a round gives every running
    request a chunk.
    """

    tokens: int
    tokens_per_round: int
    round_s: float

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest response, end token included."""
        return max(lengths(self)) + 1


def lengths(pace: Pace) -> list[int]:
    """Tokens of each response, a half to one and a half of the mean: equal ones would all end in
    the same round.
    """
    middle = (TEXTS - 1) / 2
    return [
        max(1, round(pace.tokens * (1 + (number - middle) / (TEXTS - 1))))
        for number in range(TEXTS)
    ]


def texts(pace: Pace) -> list[str]:
    """The responses: as many bytes of UTF-8, and so tokens of the demo's byte tokenizer, as
    `lengths` says.
    """
    draw = random.Random(0)
    found = []
    for size in lengths(pace):
        text = "".join(draw.choices(LETTERS, k=size)).encode()[:size].decode(errors="ignore")
        found.append(text + "." * (size - len(text.encode())))
    return found


def paces_s(pace: Pace) -> list[float]:
    """Seconds that the rounds of each response take, the one of the end token included."""
    return [pace.round_s * -(-(size + 1) // pace.tokens_per_round) for size in lengths(pace)]


def pieces(text: str, pace: Pace) -> list[str]:
    """A response cut as the scripted engine gives it out; characters whose bytes are not whole
    wait.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    raw = text.encode()
    starts = range(0, len(raw), pace.tokens_per_round)
    return [decoder.decode(raw[start : start + pace.tokens_per_round]) for start in starts]


def engine_settings(pace: Pace) -> dict[str, Any]:
    """The scripted engine's settings; rounds take no time at all when round_s is 0."""
    return {
        "replies": [
            {
                "pattern": "^<bos>bench ",
                "texts": texts(pace),
                "tokens_per_round": pace.tokens_per_round,
            }
        ],
        "arms": ["off"],
        "default_cost_s": pace.round_s,
        "costs_s": {},
        "real_time": pace.round_s > 0,
        "max_batch": MAX_BATCH,
        "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        "eos_token_id": EOS,
    }


def write_model(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """A model directory that only the scripted engine can serve, and its script.

    Raises NotFound outside a clone.
    """
    model = folder / MODEL
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / "policy_start" / name, model)
    config = {"model_type": "llama", "hidden_size": 8, "vocab_size": 320, "eos_token_id": EOS}
    (model / "config.json").write_text(json.dumps(config))
    script = folder / "script.json"
    script.write_text(json.dumps(settings))
    return model, script
