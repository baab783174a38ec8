"""Reads tokens, end tokens and chat templates of a model directory, with transformers' rules.

Imports neither torch nor transformers. Names, precedence and defaults are AutoTokenizer's.
config.py reads the shape of the same directory.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from paceline.errors import ConfigError, InvalidInput

NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""The special tokens that any tokenizer may name."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the chat template of a plain conversation, and of the template for conversations with
tools.
"""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of a model directory with further chat templates, NAME.jinja."""
_EXTRA = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class TextFiles:
    """The files about one model's text; content that a directory lacks is empty."""

    directory: Path
    spelled: Mapping[str, Any]
    """tokenizer.json."""
    settings: Mapping[str, Any]
    """tokenizer_config.json, with special_tokens_map.json if transformers reads that file."""
    templates: Mapping[str, str]
    """Chat templates by name; a single one is `default`."""

    @cached_property
    def named(self) -> dict[str, str]:
        """The special tokens for a chat template, by name: bos_token, eos_token, ..."""
        found = {name: _content(self.settings.get(name)) for name in NAMED}
        found |= {
            name: _content(value)
            for name, value in self.settings.items()
            if name.endswith("_token") and name not in NAMED
        }
        extra = _extra(self.settings)
        if isinstance(extra, Mapping):
            found |= {name: _content(value) for name, value in extra.items()}
        return {name: text for name, text in found.items() if text is not None}

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of every token, by its text."""
        listed = {_token(one).content: int(key) for key, one in self._listed.items()}
        return {**listed, **_vocabulary(self.spelled), **_added_ids(self.spelled)}

    @property
    def size(self) -> int:
        """Rows that a model needs for these tokens: the highest id plus one; 0 without tokens."""
        ids = (*_vocabulary(self.spelled).values(), *_added_ids(self.spelled).values())
        return max(ids, default=-1) + 1

    @cached_property
    def added(self) -> list[AddedToken]:
        """Tokens that transformers adds to tokenizer.json's, or makes special."""
        by_id = sorted(self._listed.items(), key=lambda item: int(item[0]))
        listed = [_token(one) for _, one in by_id]
        named = list(self.named.values())
        for one in listed:
            one.special = one.special or one.content in named
        extra = _extra(self.settings)
        more = [] if isinstance(extra, Mapping) else [_content(one) for one in extra]
        known = {one.content for one in listed} | _added_ids(self.spelled).keys()
        new = dict.fromkeys(text for text in (*named, *more) if text and text not in known)
        return [*listed, *(AddedToken(text, special=True) for text in new)]

    @property
    def _listed(self) -> Mapping[str, Any]:
        return self.settings.get("added_tokens_decoder") or {}

    def tokenizer(self, spelled: Mapping[str, Any] | None = None) -> Tokenizer:
        """The tokenizer with every token that transformers adds on loading the directory;
        `spelled`: a changed tokenizer.json. Raises ConfigError.
        """
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            message = "no tokenizer in the model directory"
            raise ConfigError(message, seen=self.directory, allowed=path.name)
        try:
            if spelled is None:
                made = Tokenizer.from_file(str(path))
            else:
                made = Tokenizer.from_str(json.dumps(spelled))
            made.add_tokens(self.added)
        except Exception as error:  # the tokenizers package has no error class of its own
            raise ConfigError(f"{path} is no tokenizer: {error}") from error
        made.no_truncation()  # some files contain the lengths of a training run
        made.no_padding()
        return made

    def template(self, *, tools: bool) -> str:
        """The chat template of a conversation, with or without tools.

        Raises InvalidInput if the model has no template for it.
        """
        if tools and TOOL_USE in self.templates:
            return self.templates[TOOL_USE]
        if DEFAULT not in self.templates:
            message = "the model has no default chat template"
            seen = ", ".join(sorted(self.templates)) or "none"
            raise InvalidInput(message, seen=seen, allowed="/v1/completions")
        return self.templates[DEFAULT]


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends an answer."""

    token_id: int
    text: str  # empty if tokenizer.json has no such id
    sources: tuple[str, ...]  # files that name the token

    def __str__(self) -> str:
        return f"{self.token_id} {self.text} ({', '.join(self.sources)})"


def read_text(directory: Path) -> TextFiles:
    """The text files of a model directory. Raises ConfigError for an unreadable file."""
    try:
        return _read_text(directory)
    except InvalidInput as error:
        message = f"{directory} holds no tokenizer: {error.message}"
        raise ConfigError(message, seen=error.seen) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"tokenizer or chat template of {directory} cannot be read: {error!r}"
        raise ConfigError(message, allowed="files as transformers writes them") from error


def _read_text(directory: Path) -> TextFiles:
    spelled = read_object(directory / "tokenizer.json")
    settings = read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_object(directory / "special_tokens_map.json")
        settings["added_tokens_decoder"] = _added(directory, settings, spelled)
    text = TextFiles(directory, spelled, settings, _templates(directory, settings))
    _ = text.size, text.added, text.ids  # malformed entries raise here
    return text


def end_tokens(directory: Path, text: TextFiles | None = None) -> list[EndToken]:
    """The union of the end tokens of config.json, generation_config.json and the tokenizer,
    config.json's first. `text`: of another directory's tokenizer.

    Raises InvalidInput for an unreadable file, and for invalid ids.
    """
    text = text or read_text(directory)
    found: dict[int, list[str]] = {}
    for name in ("config.json", "generation_config.json"):
        for token_id in token_ids(read_object(directory / name).get("eos_token_id")):
            found.setdefault(token_id, []).append(name)
    end = text.ids.get(text.named.get("eos_token", ""))
    if end is not None:
        found.setdefault(end, []).append("tokenizer")
    texts = {token_id: one for one, token_id in text.ids.items()} if found else {}
    return [EndToken(one, texts.get(one, ""), tuple(found[one])) for one in found]


def check_vocabulary(text: TextFiles, vocab_size: object) -> None:
    """Raises ConfigError if the tokenizer has ids without a row in the model."""
    if type(vocab_size) is not int or text.size <= vocab_size:
        return
    beyond = sorted((one, token) for token, one in text.ids.items() if one >= vocab_size)
    first = ", ".join(f"{token_id} {token!r}" for token_id, token in beyond[:3])
    message = f"the tokenizer of {text.directory} has more tokens than the model has rows"
    seen = f"{text.size} tokens; beyond the model: {first}" + ", ..." * (len(beyond) > 3)
    allowed = f"at most {vocab_size} (vocab_size in config.json)"
    raise ConfigError(message, seen=seen, allowed=allowed)


def token_ids(value: object) -> tuple[int, ...]:
    """The ids of an eos_token_id. Raises InvalidInput."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int or one < 0 for one in ids):
        message = "eos_token_id must be a token id or a list of them"
        raise InvalidInput(message, seen=value, allowed=">= 0")
    return tuple(ids)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a file; empty without the file.

    Raises InvalidInput for other content.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path.name} is not JSON: {error}", seen=path) from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{path.name} must hold an object", seen=path)
    return value


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates in files precede templates in tokenizer_config.json; the processor's file
    is last.
    """
    single = directory / "chat_template.jinja"
    files = {DEFAULT: single} if single.is_file() else {}
    for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja")):
        files[path.name.removesuffix(".jinja")] = path
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    given = settings.get("chat_template")
    if not given:
        given = read_object(directory / "chat_template.json").get("chat_template")
    if isinstance(given, list):
        given = {one["name"]: one["template"] for one in given}
    if not isinstance(given, dict):
        given = {DEFAULT: given} if given else {}
    return {str(name): str(source) for name, source in given.items()}


def _added(
    directory: Path, settings: Mapping[str, Any], spelled: Mapping[str, Any]
) -> dict[str, Any]:
    """added_tokens.json and the added tokens of tokenizer.json as an added_tokens_decoder."""
    extra = _extra(settings)
    special = {_content(settings.get(name)) for name in NAMED}
    special |= {_content(one) for one in (extra if isinstance(extra, list) else ())}
    legacy = {
        str(token_id): {"content": text, "special": text in special}
        for text, token_id in read_object(directory / "added_tokens.json").items()
    }
    return legacy | {str(one["id"]): one for one in spelled.get("added_tokens") or ()}


def _added_ids(spelled: Mapping[str, Any]) -> dict[str, int]:
    return {one["content"]: one["id"] for one in spelled.get("added_tokens") or ()}


def _vocabulary(spelled: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the model's own tokens: an object, or for Unigram a list of text and score."""
    model = spelled.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        return {one[0]: token_id for token_id, one in enumerate(vocabulary)}
    return vocabulary if isinstance(vocabulary, dict) else {}


def _extra(settings: Mapping[str, Any]) -> Iterable[Any]:
    return next((settings[key] for key in _EXTRA if settings.get(key)), [])


def _content(value: object) -> str | None:
    """Text of a token in either form, text or object; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _token(value: Any) -> AddedToken:
    if not isinstance(value, dict):
        return AddedToken(str(value), special=True)
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{key: value[key] for key in keys if key in value})
