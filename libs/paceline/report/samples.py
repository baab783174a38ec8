"""Shows some of the newest samples token by token: the policy's probability of each token, and
whether a drafted round gave it.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from tokenizers import Tokenizer

from paceline.arm_names import OFF
from paceline.errors import DataLoss
from paceline.models.reading import read_text
from paceline.streams import decode_trajectory, run_key
from paceline.tagged_json import from_object, to_object
from paceline.trajectory import Trajectory
from paceline.whole_files import write_whole

SHOWN, _TOKENS = 5, 600
"""Samples, and tokens of each response."""
_SHADES = (0.1, 0.7, 2.3, 4.6)
"""Surprise in nats at which each next shade begins: about 0.9, 0.5, 0.1 and 0.01 of probability."""


Part = tuple[str, str, str]
"""Adjacent tokens of equal look: CSS classes, log-probs (nats) and arm, text."""


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One branch."""

    task_id: str
    step: int
    policy_version: int
    reward: float | None
    prompt: str
    parts: tuple[Part, ...]
    left_out: int = 0  # tokens after the shown ones


async def newest_samples(client: Redis, run_id: str, tokenizer: Path) -> list[ShownSample]:
    """Samples from the trajectories still in Redis, newest first, one per task. None if the model
    has no tokenizer.
    """
    entries = await client.xrevrange(run_key(run_id, "trajectories"), count=4 * SHOWN)
    return await asyncio.to_thread(_read, entries, tokenizer)


def _read(entries: Any, tokenizer: Path) -> list[ShownSample]:
    if not tokenizer.is_file():
        return []
    codec = read_text(tokenizer.parent).tokenizer()
    found: dict[str, Trajectory] = {}
    for _, fields in entries:
        if (one := _decoded(fields)) is not None:
            found.setdefault(one.task_id, one)
    return [sample_of(one, codec) for one in list(found.values())[:SHOWN]]


def sample_of(one: Trajectory, codec: Tokenizer) -> ShownSample:
    """The trajectory in words."""
    begin = one.loss_mask.index(1) if 1 in one.loss_mask else len(one.token_ids)
    arms = [OFF] * len(one.token_ids)
    for span in one.draw_spans:
        arms[span.start : span.end] = [span.arm] * (span.end - span.start)
    ids = list(one.token_ids)
    end = min(len(ids), begin + _TOKENS)
    texts = [codec.decode(ids[:n], skip_special_tokens=False) for n in range(begin, end + 1)]

    def looks(i: int) -> tuple[str, str]:
        """CSS classes and arm of a token; text that the policy did not draw has none."""
        if not one.loss_mask[i]:
            return "prompt", ""
        shade = sum(-one.behavior_logprobs[i] >= bound for bound in _SHADES)
        accepted = bool(one.accepted_drafts) and one.accepted_drafts[i] == 1
        return f"s{shade}{' accepted' if accepted else ''}", arms[i]

    parts: list[Part] = []
    for (classes, arm), group in groupby(range(begin, end), key=looks):
        places = list(group)
        logprobs = [f"{one.behavior_logprobs[i]:.2f}" for i in places if one.loss_mask[i]]
        text = texts[places[-1] + 1 - begin].removeprefix(texts[places[0] - begin])
        parts.append((classes, " ".join([*logprobs, arm]).strip(), text))
    return ShownSample(
        one.task_id,
        one.step,
        max((span.policy_version for span in one.version_spans), default=0),
        one.reward,
        texts[0],
        tuple(parts),
        len(ids) - end,
    )


def write_samples(path: Path, samples: Iterable[ShownSample]) -> None:
    """A JSON object a line."""
    write_whole(path, "".join(json.dumps(to_object(one)) + "\n" for one in samples))


def read_samples(path: Path) -> list[ShownSample]:
    """The samples from `write_samples`; empty if the file is absent. Raises DataLoss for any other
    content.
    """
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [from_object(ShownSample, json.loads(line)) for line in lines]
    except ValueError as error:
        raise DataLoss(f"{path} does not hold samples", seen=str(error)) from error


def _decoded(fields: dict[bytes, bytes]) -> Trajectory | None:
    """None for an undecodable entry, which the trainer reports in detail."""
    header = {name.decode(): value for name, value in fields.items()}
    payload = header.pop("payload", b"")
    try:
        return decode_trajectory({k: v.decode() for k, v in header.items()}, payload)
    except (DataLoss, UnicodeDecodeError):
        return None
