"""Log-probs over HTTP under a byte-level tokenizer that splits characters: no token is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from integration.gateway.conftest import Served, serving
from random_models import random_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from paceline.services.rollout_gateway.engines.requests.tokenizer import token_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "a😀b"
TOP = 20
FREE = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 3}


def split_characters() -> Tokenizer:
    """A byte-level tokenizer: its tokens are single bytes and a few beginnings of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=266,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" 😀 😁 😂 ab ab"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken("<mark>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("split") / "model"
    tokenizer = split_characters()
    size = tokenizer.get_vocab_size() + 5
    random_model("llama", vocab_size=size, eos_token_id=1, bos_token_id=0).save_pretrained(
        directory
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    async with serving(
        directory, {}, engine={"kind": "embedded", "max_sequence_tokens": 96}
    ) as one:
        yield one


async def ask(model: Served, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = await model.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def bytes_of(model: Served) -> list[bytes]:
    padding = [b""] * 5
    return [*token_bytes(model.codec._tokenizer), *padding]


@pytest.mark.slow
async def test_an_echo_of_half_characters_holds_every_alternative_and_its_own_bytes(
    model: Served,
) -> None:
    choice = await ask(model, prompt=PROMPT, echo=True, logprobs=TOP, return_token_ids=True, **FREE)
    spelled = bytes_of(model)
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    logprobs = choice["logprobs"]
    assert len(logprobs["content"]) == len(logprobs["tokens"]) == len(ids)
    halves = 0
    for place, token in enumerate(ids):
        entry, keyed = logprobs["content"][place], logprobs["top_logprobs"][place]
        assert (entry["token_id"], bytes(entry["bytes"])) == (token, spelled[token])
        if place == 0:
            assert (keyed, entry["logprob"], entry["top_logprobs"]) == (None, None, [])
            continue
        listed = entry["top_logprobs"]
        assert len(listed) == len(keyed) == TOP
        assert len({one["token_id"] for one in listed}) == TOP
        assert all(bytes(one["bytes"]) == spelled[one["token_id"]] for one in listed)
        assert list(keyed.values()) == [one["logprob"] for one in listed]
        halves += sum(one["token"] == "\ufffd" for one in listed)
        drawn = keyed.get(logprobs["tokens"][place])
        assert drawn is None or drawn == logprobs["token_logprobs"][place]
        assert (drawn is None) == (token not in {one["token_id"] for one in listed})
    assert halves > 20
    split = [bytes(one["bytes"]) for one in logprobs["content"][1:] if len(one["bytes"])]
    assert b"".join(split).startswith(PROMPT.encode())
    assert any(one.startswith("bytes:\\x") for one in logprobs["tokens"])


def characters_before(pieces: list[bytes]) -> list[int | None]:
    """Oracle: characters before each token; None behind a character that is not whole."""
    whole, end = b"".join(pieces), 0
    found: list[int | None] = []
    for piece in pieces:
        before = whole[:end].decode(errors="replace")
        found.append(None if before.endswith("\ufffd") else len(before))
        end += len(piece)
    return found


async def test_offsets_never_decrease_and_are_those_of_the_text_of_the_choice(
    model: Served,
) -> None:
    spelled = bytes_of(model)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "return_token_ids": True, **FREE}
    for seed in range(6):
        choice = await ask(model, **{**body, "seed": seed})
        offsets, text = choice["logprobs"]["text_offset"], choice["text"]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(text)
        prompt = choice["prompt_token_ids"]
        assert (prompt[0], offsets[:2]) == (0, [0, 0])  # bos, which the prompt's text lacks
        before = characters_before([spelled[one] for one in prompt[1:]])
        given = zip(offsets[1 : len(prompt)], before, strict=True)
        assert all(place in (None, got) for got, place in given)
        said = [b"" if one in (0, 1, 266) else spelled[one] for one in choice["token_ids"]]
        told = zip(offsets[len(prompt) :], characters_before(said), said, strict=True)
        assert all(place in (None, got - len(PROMPT)) for got, place, piece in told if piece), said
    ids = await ask(model, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert ids["text"] == "<s>" + PROMPT
    assert ids["logprobs"]["text_offset"][:3] == [0, 3, 4]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_streamed_log_probs_are_those_of_the_whole_answer(
    model: Served, echo: bool, as_ids: bool
) -> None:
    body = {"prompt": PROMPT, "echo": echo, "logprobs": 5, **FREE}
    body["return_tokens_as_token_ids"] = as_ids
    whole = (await ask(model, **body))["logprobs"]
    answer = await model.http.post("/v1/completions", json={**body, "stream": True})
    lines = [json.loads(one[6:]) for one in answer.text.splitlines() if one.startswith("data: {")]
    parts = [line["choices"][0]["logprobs"] for line in lines]
    assert len(parts) > 2
    for name in ("tokens", "text_offset"):
        assert [one for part in parts for one in part[name]] == whole[name]
    keyed = [one for part in parts for one in part["top_logprobs"] or ()]
    assert [one and set(one) for one in keyed] == [
        one and set(one) for one in whole["top_logprobs"]
    ]
    listed = [one for part in parts for one in part["content"]]
    assert [one["bytes"] for one in listed] == [one["bytes"] for one in whole["content"]]


async def test_tokens_are_named_by_their_ids_where_that_is_asked_for(model: Served) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True, **FREE}
    choice = await ask(model, prompt=PROMPT, logprobs=TOP, **asked)
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    for keyed, entry in zip(
        choice["logprobs"]["top_logprobs"], choice["logprobs"]["content"], strict=True
    ):
        assert list(keyed) == [one["token"] for one in entry["top_logprobs"]]
    messages = [{"role": "user", "content": PROMPT}]
    chat = await ask(
        model, "chat/completions", messages=messages, logprobs=True, top_logprobs=TOP, **asked
    )
    entries = chat["logprobs"]["content"]
    assert [one["token"] for one in entries] == [f"token_id:{one}" for one in chat["token_ids"]]
    assert all(len({one["token"] for one in entry["top_logprobs"]}) == TOP for entry in entries)


async def test_a_chat_lists_half_characters_with_their_own_bytes(model: Served) -> None:
    spelled = bytes_of(model)
    messages = [{"role": "user", "content": PROMPT}]
    chat = await ask(
        model, "chat/completions", messages=messages, logprobs=True, top_logprobs=TOP, **FREE
    )
    for entry in chat["logprobs"]["content"]:
        for one in (entry, *entry["top_logprobs"]):
            assert bytes(one["bytes"]) == spelled[one["token_id"]]
            assert one["token"] == spelled[one["token_id"]].decode(errors="replace")
        assert len({one["token_id"] for one in entry["top_logprobs"]}) == TOP
