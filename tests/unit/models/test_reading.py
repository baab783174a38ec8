"""A model directory is read as transformers reads it, for every family of tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_models import CHATML
from tokenizer_families import CORPUS, FAMILIES, byte_level
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from paceline.errors import ConfigError
from paceline.models.config import check_model, read_config
from paceline.models.reading import end_tokens, read_text
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.reading_probe import TALK, TEXTS, TOOL, compared

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
NAMES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"]
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "<|im_end|>",
    "unk_token": "<unk>",
    "chat_template": CHATML,
}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def write(directory: Path, tokenizer: Tokenizer, shape: dict[str, Any], **settings: Any) -> None:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    put(directory, "tokenizer_config.json", {**SETTINGS, **settings})
    put(directory, "config.json", {**SHAPE, **shape})


def put(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def changed(directory: Path, name: str, **values: object) -> None:
    put(directory, name, {**json.loads((directory / name).read_text()), **values})


@pytest.fixture(params=[*FAMILIES, pytest.param("real", marks=pytest.mark.real)])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "real":
        found: Path = request.getfixturevalue("real_model")
        return found
    write(tmp_path, FAMILIES[request.param](NAMES, (*CORPUS, *TEXTS)), {"eos_token_id": 3})
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path, byte_level(NAMES), {"eos_token_id": 2})
    return tmp_path


def test_a_family_of_tokenizers_is_read_as_transformers_reads_it(family: Path) -> None:
    theirs, codec = AutoTokenizer.from_pretrained(family), TextCodec(family)
    assert codec.files.named == theirs.special_tokens_map
    assert theirs.eos_token_id in {one.token_id for one in end_tokens(family)}
    assert theirs.eos_token_id in read_config(family).eos_token_ids
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert list(codec.encode(text)) == ids
        assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": one.role, "content": one.content} for one in TALK]
    for tools in ((), (TOOL,)):
        request = ChatRequest(TALK, tools)
        given = {"tools": list(tools) or None, "add_generation_prompt": True}
        spelled = theirs.apply_chat_template(messages, tokenize=False, **given)
        assert codec.template.render(request) == spelled


def test_the_probe_refuses_no_family_of_tokenizers(family: Path) -> None:
    assert [one for one in compared(family, family) if one.verdict == "fail"] == []


def test_end_tokens_are_the_union_of_config_generation_config_and_tokenizer(model: Path) -> None:
    put(model, "generation_config.json", {"eos_token_id": [2, 0]})
    end = read_text(model).ids["<|im_end|>"]
    assert read_config(model).eos_token_ids == (2, 0, end)
    shown = [str(one) for one in end_tokens(model)]
    assert shown[0].endswith("(config.json, generation_config.json)")
    assert shown[2] == f"{end} <|im_end|> (tokenizer)"


def test_a_model_without_any_end_token_has_none(model: Path) -> None:
    changed(model, "config.json", eos_token_id=None)
    changed(model, "tokenizer_config.json", eos_token=None)
    assert end_tokens(model) == []
    assert read_config(model).eos_token_ids == ()


@pytest.mark.parametrize("value", ["<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False}])
def test_special_tokens_map_goes_before_tokenizer_config(model: Path, value: object) -> None:
    put(model, "special_tokens_map.json", {"eos_token": value, "pad_token": "<s>"})
    theirs = AutoTokenizer.from_pretrained(model)
    assert read_text(model).named == theirs.special_tokens_map
    assert theirs.eos_token == "<|endoftext|>"
    changed(model, "tokenizer_config.json", added_tokens_decoder={})
    theirs = AutoTokenizer.from_pretrained(model)
    assert read_text(model).named == theirs.special_tokens_map
    assert theirs.eos_token == "<|im_end|>"


def test_tokens_that_only_tokenizer_config_adds_are_added(model: Path) -> None:
    added = {"900": {"content": "<call>", "special": True}, "901": {"content": "<x>"}}
    changed(model, "tokenizer_config.json", added_tokens_decoder=added, image_token="<image>")
    theirs, codec = AutoTokenizer.from_pretrained(model), TextCodec(model)
    text = "a<call>b<x>c<image>"
    ids = theirs(text)["input_ids"]
    assert list(codec.encode(text)) == ids
    assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert codec.files.named == theirs.special_tokens_map


def test_an_end_token_that_is_added_and_not_special_is_read_as_transformers_does(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level(NAMES)
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=False)])
    write(tmp_path, tokenizer, {}, eos_token="<|eot_id|>")
    theirs, codec = AutoTokenizer.from_pretrained(tmp_path), TextCodec(tmp_path)
    ids = theirs("done<|eot_id|>")["input_ids"]
    assert list(codec.encode("done<|eot_id|>")) == ids
    assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "done"
    assert ids[-1] in read_config(tmp_path).eos_token_ids


NAMED = "{{ messages[0].content }}:{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"


@pytest.mark.parametrize("where", ["list", "files"])
@pytest.mark.parametrize("names", [("default", "tool_use"), ("default",), ("tool_use", "rag")])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_the_template_is_the_one_that_transformers_chooses(
    model: Path, where: str, names: tuple[str, ...], tools: tuple[dict[str, Any], ...]
) -> None:
    sources = {name: f"{name}|{{{{ bos_token }}}}{{{{ unk_token }}}}|{NAMED}" for name in names}
    if where == "list":
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        changed(model, "tokenizer_config.json", chat_template=listed)
    else:
        folder = model / "additional_chat_templates"
        folder.mkdir()
        for name, source in sources.items():
            path = model / "chat_template.jinja" if name == "default" else folder / f"{name}.jinja"
            path.write_text(source, encoding="utf-8")
    theirs, codec = AutoTokenizer.from_pretrained(model), TextCodec(model)
    request = ChatRequest((Message("user", "hi"),), tools)
    messages = [{"role": "user", "content": "hi"}]
    try:
        spelled = theirs.apply_chat_template(messages, tools=list(tools) or None, tokenize=False)
    except ValueError:
        with pytest.raises(Exception, match="no default chat template"):
            codec.template.render(request)
    else:
        assert codec.template.render(request) == spelled
        assert ("add" in spelled) == bool(tools)


def test_the_processors_old_template_file_is_read_where_there_is_no_other(model: Path) -> None:
    put(model, "chat_template.json", {"chat_template": "old"})
    assert read_text(model).templates == {"default": CHATML}
    changed(model, "tokenizer_config.json", chat_template=None)
    assert read_text(model).templates == {"default": "old"}


def test_a_tokenizer_larger_than_the_model_is_refused_by_name_and_numbers(model: Path) -> None:
    size = read_text(model).size
    changed(model, "config.json", vocab_size=size)
    check_model(model)
    changed(model, "config.json", vocab_size=size - 1)
    with pytest.raises(
        ConfigError, match=f"seen: {size} tokens; .*{size - 1} '.*at most {size - 1}"
    ):
        check_model(model)


def test_the_probe_names_each_difference_and_refuses_a_misread_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = TextCodec.encode
    monkeypatch.setattr(
        TextCodec, "encode", lambda codec, text, *more, **named: encode(codec, text + "!")
    )
    found = [one for one in compared(model, model) if one.verdict == "fail"]
    assert [one.check for one in found] == ["encoding", "chat", "chat with tools"]
    assert "in transformers nothing" in found[0].seen


def test_the_probe_refuses_other_tokens_of_a_chat_than_transformers_has(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = TextCodec.encode_chat
    monkeypatch.setattr(
        TextCodec, "encode_chat", lambda codec, *given: (*encode(codec, *given)[1:], 5)
    )
    found = [one for one in compared(family, family) if one.verdict == "fail"]
    assert [one.check for one in found] == ["chat", "chat with tools"]
    assert "at token 0" in found[0].seen


def test_a_malformed_tokenizer_is_a_wrong_setting(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    for settings in ({"added_tokens_decoder": {"x": "y"}}, {"added_tokens_decoder": {"1": {}}}):
        put(tmp_path, "tokenizer_config.json", settings)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_text(tmp_path)
