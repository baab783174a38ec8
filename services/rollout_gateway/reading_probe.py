"""Compares the gateway's reading of a model directory with transformers' tokenizer.

This is a separate program, because it imports transformers. Its arguments are `MODEL [TOKENIZER]`;
it prints a JSON list of findings. It does not load torch, which keeps the import short.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput, PacelineError
from paceline.local.checks import Finding
from paceline.models.reading import check_vocabulary, end_tokens, read_object, read_text
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.chat.text import TextCodec

TEXTS = (
    *("Hello, world!", " two  spaces and 1234567", 'def f(x):\n\treturn {"a": [x]}\n'),
    *("Grüße, naïve café", "漢字とかな 😀", "Привет мир"),
)
_ASKED = Message("user", "What is 2+3?")
TALK = (_ASKED, Message("assistant", "It is 5."), Message("user", "And 4+4?"))
_SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
_ADD = {"name": "add", "description": "Adds two numbers.", "parameters": _SCHEMA}
TOOL = {"type": "function", "function": _ADD}
TOKENS = 200
"""Number of tokens with compared bytes."""
READING = "model reading"
_ADVICE = "a directory as transformers saves it: tokenizer.save_pretrained(directory)"
_SHOWN = 80


def compared(model: Path, tokenizer: Path) -> list[Finding]:
    """Every difference to transformers: `fail` if text would be misread, else `warn`."""
    check_vocabulary(read_text(tokenizer), read_object(model / "config.json").get("vocab_size"))
    if find_spec("transformers") is None:
        return [Finding(READING, "ok", "not compared: transformers is not installed")]
    try:
        theirs = _load(tokenizer)
    except Exception as error:  # noqa: BLE001 - foreign code over foreign files
        seen = f"transformers cannot read {tokenizer}: {type(error).__name__}: {error}"
        return [Finding(READING, "warn", seen[:400], _ADVICE)]
    codec = TextCodec(tokenizer)
    ends = [one.token_id for one in end_tokens(model, codec.files)]
    found = [
        *_ends(model, ends, codec, theirs),
        *_texts(codec, theirs),
        *_chats(codec, theirs),
        *_bytes(model, ends, codec, theirs),
    ]
    return found or [Finding(READING, "ok", f"{tokenizer} is read as transformers reads it")]


def _load(directory: Path) -> Any:
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _ends(model: Path, ours: Sequence[int], codec: TextCodec, theirs: Any) -> Iterator[Finding]:
    if theirs.eos_token_id is not None and theirs.eos_token_id not in ours:
        seen = f"transformers ends at {theirs.eos_token_id} {theirs.eos_token!r}, not in {ours}"
        yield Finding("end tokens", "fail", seen, "eos_token in tokenizer_config.json")
    if not ours:
        yield Finding("end tokens", "warn", f"no file of {model} names one", "eos_token_id")
    named = theirs.special_tokens_map
    for name in sorted(named.keys() | codec.files.named.keys()):
        pair = codec.files.named.get(name), named.get(name)
        if pair[0] != pair[1]:
            seen = f"{name} is {pair[0]!r}, in transformers {pair[1]!r}"
            yield Finding("special tokens", "warn", seen, f"{name} in tokenizer_config.json")


def _texts(codec: TextCodec, theirs: Any) -> Iterator[Finding]:
    for text in TEXTS:
        ours, other = list(codec.encode(text)), theirs(text)["input_ids"]
        if ours != other:
            where = _difference(codec, ours, other)
            yield Finding("encoding", "fail", f"{text!r}: {where}", _ADVICE)
            return
        shown = theirs.decode(other, skip_special_tokens=True)
        if codec.decode(ours) != shown:
            seen = f"tokens of {text!r} are {codec.decode(ours)!r}, in transformers {shown!r}"
            yield Finding("decoding", "warn", seen)


def _chats(codec: TextCodec, theirs: Any) -> Iterator[Finding]:
    if not theirs.chat_template:
        return
    messages = [{"role": one.role, "content": one.content} for one in TALK]
    for tools in ((), (TOOL,)):
        name, request = "chat with tools" if tools else "chat", ChatRequest(TALK, tools)
        given: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True}
        refused: list[Exception] = []
        try:
            other = theirs.apply_chat_template(messages, tokenize=False, **given)
        except Exception as error:  # noqa: BLE001 - a template raises anything
            refused.append(error)
            other = f"the error {error}"
        try:
            ours = codec.template.render(request)
        except InvalidInput as error:
            refused.append(error)
            ours = f"the error {error}"
        if len(refused) == 2:
            continue
        if ours != other:
            at = slice(begin := _parting(ours, other), begin + _SHOWN)
            seen = f"at character {begin} {ours[at]!r}, in transformers {other[at]!r}"
            yield Finding(name, "fail", seen, _ADVICE)
            continue
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
        ids = list(codec.encode_chat(request))
        if ids != expected:
            yield Finding(name, "fail", _difference(codec, ids, expected), _ADVICE)


def _bytes(model: Path, ends: Sequence[int], codec: TextCodec, theirs: Any) -> Iterator[Finding]:
    """Compare a grammar's bytes of a token with transformers' text of the token within a text."""
    if find_spec("llguidance") is None:
        return
    vocab_size = read_object(model / "config.json").get("vocab_size", codec.files.size)
    from paceline.services.rollout_gateway.engines.requests.grammar_judge import GrammarTokens

    try:
        path = codec.files.directory / "tokenizer.json"
        ours = GrammarTokens(path, vocab_size, ends or [0]).tokens  # [V] bytes of each token
    except PacelineError as error:
        yield Finding("grammar", "warn", f"structured answers are refused: {error}"[:400])
        return
    special = {*theirs.all_special_ids, *theirs.added_tokens_decoder}
    plain = theirs("0 0", add_special_tokens=False)["input_ids"]
    before = theirs.decode(plain)
    for token_id in range(0, codec.files.size, max(codec.files.size // TOKENS, 1)):
        text = theirs.decode([*plain, token_id])
        if token_id in special or not text.startswith(before):
            continue
        told = ours[token_id].decode(errors="replace")
        if told and told != text.removeprefix(before):
            seen = f"token {token_id} is {told!r}, in transformers {text.removeprefix(before)!r}"
            yield Finding("grammar", "warn", f"structured answers may be misread: {seen}")
            return


def _difference(codec: TextCodec, ours: Sequence[int], theirs: Sequence[int]) -> str:
    at = _parting(ours, theirs)

    def shown(ids: Sequence[int]) -> str:
        parts = [f"{one} {codec.token_text(one)!r}" for one in ids[at : at + 3]]
        return ", ".join(parts) or "nothing"

    return f"at token {at} {shown(ours)}, in transformers {shown(theirs)}"


def _parting(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """The first index at which the two differ."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def main(argv: Sequence[str]) -> None:
    """Print the findings."""
    model = Path(argv[0])
    try:
        found = compared(model, Path(argv[1]) if argv[1:] else model)
    except PacelineError as error:
        found = [Finding.of_error(READING, error)]
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main(sys.argv[1:])
