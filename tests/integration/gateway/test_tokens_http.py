"""Tokenising over HTTP agrees with the tokenizer itself."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tokenizers import Tokenizer

from benchmarks.demo_runs import demo_folder

TOKENIZER = Tokenizer.from_file(str(demo_folder() / "policy_start" / "tokenizer.json"))
"""That of the model that is served, too."""
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "1", "messages": [{"role": "user", "content": "1"}]}, "prompt"),
    ("/tokenize", {"prompt": 7}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1 << 31]}, "tokens[0]"),
    ("/detokenize", {"tokens": "12"}, "tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1] * 30_000}, "tokens"),
]


async def test_a_text_is_tokenised_as_its_tokenizer_does_and_comes_back(serve_gateway: Any) -> None:
    text = "120:084=-"
    expected = TOKENIZER.encode(text).ids
    async with serve_gateway() as served:
        asked = {"model": "tiny-model", "prompt": text}
        answer = (await served.http.post("/tokenize", json=asked)).json()
        assert (answer["tokens"], answer["count"]) == (expected, len(expected))
        models = (await served.http.get("/v1/models")).json()
        assert answer["max_model_len"] == models["data"][0]["max_model_len"] > 0
        back = (await served.http.post("/detokenize", json={"tokens": expected})).json()
        assert back == {"prompt": TOKENIZER.decode(expected, skip_special_tokens=False)}
        bare = {"prompt": "12", "add_special_tokens": False}
        answer = (await served.http.post("/tokenize", json=bare)).json()
        assert answer["tokens"] == TOKENIZER.encode("12", add_special_tokens=False).ids
        assert (await served.http.get("/version")).json() == {"version": version("paceline")}


async def test_what_cannot_be_tokenised_is_refused_by_field(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        for path, body, field in WRONG:
            answer = await served.http.post(path, json=body)
            told = answer.status_code, answer.json()["error"]["param"]
            assert told == (400, field), (path, body.keys())
