"""response_format over HTTP with the embedded engine: answers are JSON of the schema, and are not
trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

POLICY = str(Path(__file__).parents[3] / "examples" / "demo" / "policy_start")
EMBEDDED = {"engine": {"kind": "embedded", "workers": 1}, "model": POLICY, "drafter": "ngram"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def asked(form: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "48:36="}],
        "max_tokens": 150,
        "response_format": form,
        **more,
    }


async def test_answers_are_json_of_the_schema_and_cannot_be_trained(serve_gateway: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    async with serve_gateway(**EMBEDDED) as served:
        for seed in range(3):
            answer = await served.http.post("/v1/chat/completions", json=asked(form, seed=seed))
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            value = json.loads(choice["message"]["content"])
            assert choice["finish_reason"] == "stop"
            assert set(value) == {"a", "b"}
            assert value["a"] in range(10)
            assert value["b"] in ("x", "y")
        session = (await served.http.post("/v1/sessions", json={})).json()
        headers = {"authorization": f"Bearer {session['api_key']}"}
        refused = await served.http.post("/v1/chat/completions", json=asked(form), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_trainable")
        bad = {
            "type": "json_schema",
            "json_schema": {"name": "bad", "schema": {"type": "nonsense"}},
        }
        wrong = await served.http.post("/v1/chat/completions", json=asked(bad))
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "response_format"), (
            wrong.text
        )
