"""Reads training data, JSONL or Parquet, into token sequences with a mask.

A record has one of these forms:

    {"messages": [{"role": ..., "content": ...}, ...]}     under the model's chat template
    {"prompt": "...", "response": "..."}                   as plain text
    {"input_ids": [...], "loss_mask": [...]}               as tokens; 1 marks the model's tokens
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError, InvalidInput
from paceline.services.drafter_trainer.offline.config import OfflineConfig
from paceline.tasks.records import place_of, read_records
from paceline.training.process import from_all_ranks
from paceline.whole_files import write_whole

FORMS = (
    '{"messages": [...]}, {"prompt": "...", "response": "..."} or '
    '{"input_ids": [...], "loss_mask": [...]}'
)
SUFFIXES = (".jsonl", ".parquet")


class MessageRecord(BaseModel):
    """One message of a conversation; chat templates may read further fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Any


class Record(BaseModel):
    """A record of one of the three forms; fields of the other forms are None."""

    model_config = ConfigDict(strict=True)
    messages: list[MessageRecord] | None = Field(default=None, min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    response: str | None = Field(default=None, min_length=1)
    input_ids: list[Annotated[int, Field(lt=1 << 63)]] | None = Field(default=None, min_length=1)
    loss_mask: list[Literal[0, 1] | bool] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of n tokens."""

    token_ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """[n] bool: the model's own tokens, which a drafter must predict; all False for a prompt
    without an answer.
    """

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The tokens before the last answer; all tokens without an answer."""
        said = np.flatnonzero(self.mask)
        if not len(said):
            return self.token_ids
        gaps = np.flatnonzero(np.diff(said) > 1)
        return self.token_ids[: said[gaps[-1] + 1] if len(gaps) else said[0]]


Parts = Sequence[tuple[Sequence[int], bool]]
"""Tokens, and whether they are the model's."""


def example(parts: Parts) -> Example:
    """The parts of a sequence together."""
    ids = [token for part, _ in parts for token in part]
    mask = [said for part, said in parts for _ in part]
    return Example(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))


def read_samples(
    path: Path, text: Callable[[], ModelText], vocab_size: int, *, prompts: bool = False
) -> list[Example]:
    """All records of a file, or of a directory's .jsonl and .parquet files in order of name.

    `text`: called for records of text. `prompts`: accept records without an answer. Raises
    InvalidInput with file and line of a bad record, ConfigError for a path without data.
    """
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not files[0].is_file() or files[0].suffix not in SUFFIXES:
        raise ConfigError(
            "no training data there", seen=path, allowed=f"a file or a directory of {SUFFIXES}"
        )
    samples = []
    for file in files:
        for number, found in read_records(file):
            try:
                samples.append(_sample(found, text, vocab_size, prompts=prompts))
            except ConfigError:
                raise  # not a fault of this line
            except InvalidInput as error:
                raise error.within(place_of(file, number)) from error

    if not samples:
        raise ConfigError("the data holds no record", seen=path, allowed=FORMS)
    return samples


def fingerprint(samples: Iterable[Example]) -> str:
    """Hash of tokens and masks."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.token_ids.tobytes() + sample.mask.tobytes())
    return digest.hexdigest()[:16]


def _sample(
    found: Mapping[str, object], text: Callable[[], ModelText], vocab_size: int, *, prompts: bool
) -> Example:
    try:
        record = Record.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        seen = repr(first["input"])[:80]
        raise InvalidInput(f"{where}: {first['msg']}", seen=seen) from error

    sample = _example(record, text, sorted(found))
    low, high = int(sample.token_ids.min(initial=0)), int(sample.token_ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise InvalidInput(
            "tokens outside the model's vocabulary",
            seen=(int(sample.token_ids.min()), high),
            allowed=f"0 to {vocab_size - 1}",
        )
    if not prompts and not sample.mask.any():
        raise InvalidInput(
            "no answer of the model to learn from",
            seen=sorted(found),
            allowed="a response, a loss_mask with ones, or --regenerate",
        )
    return sample


def _example(record: Record, text: Callable[[], ModelText], names: Sequence[str]) -> Example:
    if record.messages is not None:
        return text().chat([message.model_dump() for message in record.messages])
    if record.prompt is not None:
        return text().completion(record.prompt, record.response)
    if record.input_ids is None:
        raise InvalidInput("a record of no known form", seen=names, allowed=FORMS)
    mask = [False] * len(record.input_ids) if record.loss_mask is None else record.loss_mask
    if len(mask) != len(record.input_ids):
        raise InvalidInput(
            "loss_mask and input_ids differ in length",
            seen=len(mask),
            allowed=len(record.input_ids),
        )
    return Example(np.array(record.input_ids, dtype=np.int64), np.array(mask, dtype=bool))


class ModelText:
    """Tokenizer and chat template of a model directory. Raises ConfigError where there is none."""

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids`: end tokens of the model; a completion's answer ends with the first."""
        from transformers import AutoTokenizer  # seconds of import, needed for text alone

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"no tokenizer can be loaded from {directory}: {reason}",
                allowed='records with "input_ids"',
            ) from error
        self._eos = tuple(eos_token_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """The tokens of a conversation. An answer counts as the model's if the template renders its
        beginning independently of later messages. Raises InvalidInput if no answer counts.
        """
        if messages[-1]["role"] != "assistant":
            return example([(self._encode(self._render(messages, answer=True)), False)])
        whole, parts, done = self._render(messages), list[tuple[Sequence[int], bool]](), 0
        for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            before, after = self._render(messages[:i], answer=True), self._render(messages[: i + 1])
            if whole.startswith(after) and after.startswith(before) and len(before) >= done:
                parts.append((self._encode(whole[done : len(before)]), False))
                said = self._encode(whole[len(before) : len(after)])
                # What a template writes after the end token was never generated.
                end = next((i + 1 for i, token in enumerate(said) if token in self._eos), len(said))
                parts += [(said[:end], True), (said[end:], False)]
                done = len(after)
        if not parts:
            raise InvalidInput(
                "the chat template does not begin an answer as it ends a prompt", seen=whole[-80:]
            )
        return example([*parts, (self._encode(whole[done:]), False)])

    def completion(self, prompt: str, response: str | None) -> Example:
        """The prompt as the tokenizer begins a text; the answer ends with the model's end token."""
        begun = self._tokenizer(prompt, add_special_tokens=True)["input_ids"]
        # Some tokenizers end every text.
        while len(begun) > 1 and begun[-1] in self._eos:
            begun = begun[:-1]
        said = [] if response is None else [*self._encode(response), *self._eos[:1]]
        return example([(begun, False), (said, True)])

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        try:
            plain = [dict(message) for message in messages]
            return str(
                self._tokenizer.apply_chat_template(
                    plain, tokenize=False, add_generation_prompt=answer
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"the chat template refused the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


BATCH = 16
"""Number of prompts that one rank answers at a time."""


def own_answers(
    lm: Any,
    samples: Sequence[Example],
    config: OfflineConfig,
    limit: int,
    read: Callable[[Path], list[Example]],
    told: Callable[[int, int], None],
) -> list[Example]:
    """One sample per prompt with the model's own answer, drawn at `config.temperature` (0: the most
    likely token), once per output directory. Collective; all ranks return all samples.

    `limit`: maximum tokens of prompt and answer together; longer prompts than limit - 2 are left
    out. `read`: reads the samples of a file. `told(done, all)` reports this rank's share. Raises
    InvalidInput when no prompt is left.
    """
    drawn = f"{config.model.resolve()} {config.max_tokens} {config.temperature} {config.seed} "
    name = hashlib.sha256((drawn + fingerprint(samples)).encode()).hexdigest()[:16]
    path = config.out / f"answers-{name}.jsonl"
    known = path.exists()
    dist.barrier()  # all ranks have checked for the file
    if known:
        return read(path)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed + rank)
    prompts = [p for one in samples if 1 <= len(p := one.prompt.tolist()) <= limit - 2]
    if not prompts:
        raise InvalidInput(
            "no prompt can be answered",
            seen=f"{len(samples)} prompts",
            allowed=f"1 to {limit - 2} tokens",
        )

    # A batch is padded to its longest prompt, so similar lengths are batched together.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))[rank::world]
    own: list[tuple[int, list[int]]] = []
    for begin in range(0, len(order), BATCH):
        chunk = order[begin : begin + BATCH]
        room = min(config.max_tokens, limit - max(len(prompts[i]) for i in chunk))
        answers = _generate(lm, [prompts[i] for i in chunk], room, config.temperature)
        own += zip(chunk, answers, strict=True)
        told(len(own), len(order))

    found = dict(pair for share in from_all_ranks(own) for pair in share)
    if rank == 0:
        lines = (
            {
                "input_ids": [*prompt, *found[i]],
                "loss_mask": [0] * len(prompt) + [1] * len(found[i]),
            }
            for i, prompt in enumerate(prompts)
        )
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    return [example([(prompt, False), (found[i], True)]) for i, prompt in enumerate(prompts)]


@torch.inference_mode()
def _generate(
    lm: Any, prompts: Sequence[Sequence[int]], room: int, temperature: float
) -> list[list[int]]:
    """Answers up to the end token, included."""
    from transformers import GenerationConfig

    ends = set(lm.generation_config.eos_token_id or [])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + [*one] for one in prompts])
    seen = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=room,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
        do_sample=temperature > 0,
        **drawn,
    )
    out = lm.generate(input_ids=ids, attention_mask=seen, generation_config=settings)
    rows = out[:, width:].tolist()
    return [row[: next((i for i, t in enumerate(row, 1) if t in ends), len(row))] for row in rows]
