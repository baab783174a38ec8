"""The published document holds: valid and invalid generated requests get the documented answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    status_code_conformance,
)

from paceline.local.patience import patient
from paceline.services.rollout_gateway.api.http.app import OPERATIONS, all_routes, document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
]
EXAMPLES = 12
"""Number of requests of each kind by operation."""
ROUNDS = 8
"""Most valid requests tried until the gateway serves one. The model's template or vocabulary
refuses some valid requests, which no document can describe.
"""
TOKEN = "secret"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


class Generated:
    """Generated requests to one gateway; valid requests name existing objects, so that they reach
    more than a 404.
    """

    def __init__(self, url: str) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()  # of right requests
        self._http = httpx.Client(base_url=url, headers=HEADERS, timeout=patient(20))
        self._schema = schemathesis.openapi.from_url(f"{url}/openapi.json")

    def run(self) -> None:
        """Sends requests to every operation. Raises an error for each violated promise."""
        with self._http:
            for found in self._schema.get_all_operations():
                operation = found.ok()
                for attempt in range(ROUNDS):
                    known = self._known(operation.path)
                    self._hold(operation, GenerationMode.POSITIVE, known, attempt)
                    if operation.label in self.served():
                        break
                if operation.path_parameters or operation.body or operation.query:
                    self._hold(operation, GenerationMode.NEGATIVE, {})

    def served(self) -> set[str]:
        """Operations that served a valid request."""
        return {label for label, status in self.statuses if status < 300}

    def _known(self, path: str) -> dict[str, str]:
        """Names of existing objects."""
        if "sessions/{id}" in path:
            return {"id": self._post("/v1/sessions", {})["id"]}
        if path == "/v1/rewards" or "responses/{id}" in path:
            name = self._post("/v1/responses", {"input": "Hi"})["id"]
            return {"id": name, "completion_id": name}
        return {"name": "tiny-model"}

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def _hold(
        self, operation: APIOperation, mode: GenerationMode, known: dict[str, str], attempt: int = 0
    ) -> None:
        @seed(attempt)
        @settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Case) -> None:
            for name in set(case.path_parameters) & set(known):
                case.path_parameters[name] = known[name]
            if isinstance(case.body, dict):
                if "completion_id" in known:
                    case.body["completion_id"] = known["completion_id"]
                if case.body.get("claim") is True:
                    case.body["wait_s"] = 0  # nobody offers tasks here
            answer = case.call(headers=HEADERS, timeout=patient(20))
            if answer.status_code != 413:  # a refusal too, though the checks do not include it
                case.validate_response(answer, checks=CHECKS, headers=HEADERS)
            if mode is GenerationMode.POSITIVE:
                self.statuses[operation.label, answer.status_code] += 1

        check()


def run(url: str) -> set[str]:
    """Operations that served a valid request. Called from a thread, because the gateway runs on the
    test's event loop.
    """
    generated = Generated(url)
    generated.run()
    return generated.served()


@pytest.mark.slow
async def test_generated_requests_get_the_answers_of_the_document(
    conversations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    async with conversations(api={"model_names": ["*"]}) as served:  # any that is generated
        served_well = await asyncio.to_thread(run, str(served.http.base_url).rstrip("/"))
        assert served_well == {f"{one.method.upper()} {one.path}" for one in OPERATIONS}


def test_the_document_has_every_route_that_speaks_json() -> None:
    routed = {
        (method.lower(), route.path)
        for route in all_routes()
        for method in set(route.methods or ()) - {"HEAD"}
    }
    published = {(method, path) for path, about in document()["paths"].items() for method in about}
    assert routed - published == {("get", "/metrics"), ("get", "/openapi.json")}
    assert published <= routed
