"""An agent of twenty turns on a pretrained model of 135M parameters: a turn computes its own new
tokens alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.local.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
TURNS = 20
LEAST = 64  # prefix_tokens


async def test_each_turn_of_an_agent_finds_the_turns_before_it_in_the_cache(
    serve_gateway: Any, real_model: Path
) -> None:
    engine = {"kind": "embedded", "workers": 1, "threads": 0, "max_sequence_tokens": 2048}
    async with serve_gateway(model=str(real_model), engine=engine) as served:
        opened = (await served.http.post("/v1/sessions", json={"task_id": "t"})).json()
        key = {"Authorization": f"Bearer {opened['api_key']}"}
        messages: list[dict[str, str]] = []
        before = 0
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Name a river whose number is {turn}."})
            body = {"model": "", "messages": messages, "max_tokens": 12, "seed": turn}
            answer = await served.http.post(
                "/v1/chat/completions", json=body, headers=key, timeout=patient(120)
            )
            assert answer.status_code == 200, answer.text
            found = answer.json()
            messages.append(found["choices"][0]["message"])
            usage = found["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            # The last token of a turn is drawn and not yet cached. Short turns are not kept.
            kept = before - 1
            assert cached == (kept if kept >= LEAST else 0), f"turn {turn}: {usage}"
            before = usage["total_tokens"]
        state = (await served.http.get(f"/v1/sessions/{opened['id']}", headers=key)).json()
        assert state["turns"] == TURNS
