"""One of two SGLang workers tries a new set first. A refused set serves nobody, and the other
worker keeps the old set and its tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from integration.gateway.commands import commit, note_commands, until_serving, workers
from sglang_served import DEMO, greedy, load_oracle
from sglang_sets import DRAFTER, POLICY, QUESTIONS, START_S, demo_tensors, filled, prompts, pushed

from paceline.config import SecurityConfig
from paceline.errors import WeightsError
from paceline.local.patience import patient
from paceline.rpc import channel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.server import running
from paceline.trajectory import VersionSet
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
Answer = tuple[list[int], set[int]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimpleNamespace]:
    """A gateway with two workers that serve the demo's trained policy and drafter."""
    config = GatewayConfig.model_validate(
        {
            "model": str(DEMO / "policy_trained"),
            "drafter": str(DEMO / "drafter_trained"),
            "run": {"id": "canary", "dir": str(tmp_path_factory.mktemp("canary"))},
            "addresses": {"gateway": "127.0.0.1:0", "http": "127.0.0.1:0"},
            "speculation": {"arms": ["off", "eagle:3_1_4"]},
            "canary": {"deadline_s": patient(30)},
            "engine": {
                "kind": "sglang",
                "workers": 2,
                "dtype": "float32",
                "max_sequence_tokens": 256,
                "ready_deadline_s": patient(START_S),
            },
        }
    )
    async with (
        running(config) as (port, _),
        channel(f"127.0.0.1:{port}", SecurityConfig()) as connection,
    ):
        stub: Any = RolloutServiceStub(connection)
        numbers, serving = itertools.count(1), VersionSet()
        yield SimpleNamespace(
            config=config, channel=connection, stub=stub, numbers=numbers, serving=serving
        )


async def take(served: Any, versions: VersionSet) -> None:
    """Commit a set that passes."""
    await commit(served, versions)
    served.serving = versions
    await until_serving(served, [(versions.policy, versions.drafter)] * 2)


async def said(served: Any, prompt: list[int], count: int) -> Answer:
    """Greedy tokens, and the policy versions that drew them."""
    sampling = tpb.SamplingParams(temperature=0, max_tokens=count, seed=1, ignore_eos=True)
    request = rpb.GenerateRequest(token_ids=rpb.TokenIds(ids=prompt), sampling=sampling)
    call = served.stub.Generate(request, timeout=patient(120))
    chunks = [piece.chunk async for piece in call]
    assert chunks[-1].finish_reason == tpb.FINISH_REASON_LENGTH, chunks[-1].error
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, {span.policy_version for chunk in chunks for span in chunk.version_spans}


async def all_said(served: Any, count: int) -> list[Answer]:
    """To all prompts at once, of which each worker then has one."""
    return list(await asyncio.gather(*(said(served, prompt, count) for prompt in prompts())))


async def pids(served: Any) -> list[int]:
    return [worker.pid for worker in await workers(served)]


async def refused(served: Any, versions: VersionSet, match: str) -> None:
    """The set is refused while both workers have a request, without effect on the requests. The
    worker that tried the set is replaced, the other worker stays.
    """
    before, expected = await pids(served), await all_said(served, 200)
    assert [seen for _, seen in expected] == [{served.serving.policy}] * len(QUESTIONS)
    under_way = [asyncio.create_task(said(served, prompt, 200)) for prompt in prompts()]
    async with asyncio.timeout(patient(20)):
        while not all(worker.health.running for worker in await workers(served)):
            pass
    with pytest.raises(WeightsError, match=match):
        await commit(served, versions)
    assert await all_said(served, 200) == expected
    assert await asyncio.gather(*under_way) == expected
    await until_serving(served, [(served.serving.policy, served.serving.drafter)] * 2, START_S)
    assert len(set(before) & set(await pids(served))) == 1
    assert await all_said(served, 200) == expected


async def test_a_policy_is_tried_on_one_worker_and_then_served_by_both(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start = await pids(served), load_oracle(DEMO / "policy_start")
    for name in ("policy_start", "policy_trained"):
        versions = await pushed(served, POLICY, demo_tensors(name))
        with monkeypatch.context() as patched:
            order = note_commands(patched)
            await take(served, versions)
        about = [(when, worker, what) for when, worker, what in order if what != "get_health"]
        canary = about[0][1]
        alone = [("sent", canary, "commit_weights"), ("answered", canary, "commit_weights")]
        assert about[:3] == [*alone, ("sent", canary, "enqueue")]
        assert ("sent", 1 - canary, "commit_weights") in about[3:]
        if name == "policy_start":
            expected = [(greedy(start, prompt, 24), {versions.policy}) for prompt in prompts()]
            assert await all_said(served, 24) == expected
    assert await pids(served) == before


async def test_a_policy_whose_logits_are_not_finite_serves_nobody(served: Any) -> None:
    broken = demo_tensors("policy_start")
    broken["model.norm.weight"] = filled(broken["model.norm.weight"], 3e38)
    versions = await pushed(served, POLICY, broken)
    await refused(served, versions, r"the canary, refused set .*finite log-probs")


async def test_a_drafter_that_has_collapsed_serves_nobody_and_one_that_drafts_well_serves(
    served: Any,
) -> None:
    good = demo_tensors("drafter_trained")
    collapsed = {name: filled(tensor, 0) for name, tensor in good.items()}
    versions = await pushed(served, DRAFTER, collapsed)
    await refused(served, versions, r"the canary, refused set .*acceptance; seen: 0\.000")
    await take(served, await pushed(served, DRAFTER, good))
