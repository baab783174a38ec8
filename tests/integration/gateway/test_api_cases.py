"""Every row of the table in docs/api.md, sent over HTTP to a gateway with the embedded engine."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from integration.gateway.conftest import POLICY_MODEL, Served, serving, tiny_model
from integration.gateway.conversations import naming_tokenizer

ROOT = Path(__file__).parents[3]
USER = [{"role": "user", "content": "1+1="}]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "1+1=", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "1+1=", "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 4}),
}
ROW = re.compile(
    r"\| (?P<asked>[^|]+) \| (?P<api>\w+) \| `(?P<fields>\{.*\})` \| (?P<outcome>.+) \|"
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class ApiCase:
    """One row of the table."""

    api: str
    fields: dict[str, Any]
    outcome: str  # "served", "refused" or "ignored"
    names: tuple[str, ...]  # fields that are refused or ignored


def cases() -> dict[str, ApiCase]:
    """Rows of the table, each with a test id."""
    text = (ROOT / "docs" / "api.md").read_text()
    rows = text.partition("## Cases")[2].strip().splitlines()
    start = next(index for index, row in enumerate(rows) if row.startswith("|---"))
    found: dict[str, ApiCase] = {}
    for row in rows[start + 1 :]:
        match = ROW.fullmatch(row)
        assert match, f"not a row of the table: {row}"
        outcome, _, names = match["outcome"].partition(": ")
        name = f"{match['api']}: {match['asked']}"
        assert name not in found, name
        found[name] = ApiCase(
            match["api"], json.loads(match["fields"]), outcome, tuple(re.findall("`(.+?)`", names))
        )
    return found


CASES = cases()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model_dir = tiny_model(tmp_path_factory.mktemp("cases") / "beside")
    engine = {"kind": "embedded", "max_sequence_tokens": 256}
    words = naming_tokenizer(POLICY_MODEL, model_dir.parent / "naming")
    settings = {"model": str(POLICY_MODEL), "tokenizer": words, "engine": engine}
    async with serving(model_dir, {}, **settings) as one:
        yield one


async def test_the_table_has_cases_of_every_api_and_outcome() -> None:
    assert len(CASES) > 100
    assert {(one.api, one.outcome) for one in CASES.values()} == {
        (api, outcome) for api in APIS for outcome in ("served", "refused", "ignored")
    }
    assert all(bool(one.names) == (one.outcome != "served") for one in CASES.values())


@pytest.mark.parametrize("name", CASES)
async def test_a_case_is_served_refused_by_name_or_said_to_be_ignored(
    model: Served, name: str
) -> None:
    case = CASES[name]
    path, body = APIS[case.api]
    answer = await model.http.post(path, json={**body, **case.fields})
    ignored = answer.headers.get("x-paceline-ignored")
    if case.outcome == "refused":
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        (field,) = case.names
        if case.api == "messages":  # its errors can name the field only in the message
            unserved = f"{field}: " if field != "model" else "the model "
            assert error["message"].startswith(unserved)
        else:
            assert error["param"] == field
        return
    assert answer.status_code == 200, answer.text
    assert ignored == (", ".join(case.names) or None)
    if case.fields.get("stream"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert '"error":{' not in answer.text
