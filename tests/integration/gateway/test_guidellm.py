"""Runs guidellm's load over the gateway of a pretrained chat model, where both are installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from example_runs import gateway
from outside_tools import program

from paceline.client import find_token
from paceline.local.patience import patient

pytestmark = [pytest.mark.tools, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 32, 16


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_all_of_its_requests_end_with_the_tokens_that_it_asks_for(
    real_model: Path, tmp_path: Path, path: str
) -> None:
    guidellm = program("guidellm", "guidellm", "guidellm")
    out = tmp_path / "found.json"
    engine = ("gateway.engine.workers=1", "gateway.engine.max_batch=2")
    with gateway(tmp_path, f"gateway.model={real_model}", *engine) as url:
        spec = {
            "backend": {
                "kind": "openai_http",
                "target": url,
                "api_key": find_token(url),
                "request_format": path,
            },
            "profile": {"kind": "concurrent", "streams": [2]},
            "constraints": [{"kind": "max_requests", "count": REQUESTS}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(real_model)},
            "data": [
                {
                    "kind": "synthetic_text",
                    "prompt_tokens": PROMPT_TOKENS,
                    "output_tokens": OUTPUT_TOKENS,
                }
            ],
            "outputs": [{"kind": "json", "path": str(out)}],
        }
        scenario = tmp_path / "scenario.json"
        scenario.write_text(json.dumps({"spec": spec}))
        done = subprocess.run(
            [guidellm, "run", "--config", str(scenario), "--disable-console-interactive"],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=patient(400),
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = json.loads(out.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    tokens = measured["metrics"]["output_token_count"]["successful"]
    assert tokens["total_sum"] == REQUESTS * OUTPUT_TOKENS
