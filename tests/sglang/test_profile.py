"""A policy in int8 in SGLang: the profile is a member of every set, and each version is rounded
into the serving storages. A set that a canary refuses leaves the numbers and profile of the earlier
set.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from integration.gateway.commands import commit, until_serving, workers
from sglang_served import DEMO, load_oracle
from sglang_sets import DRAFTER, POLICY, START_S, demo_tensors, filled, prompts, pushed
from torch import nn
from transformers import PreTrainedModel

from paceline.config import SecurityConfig
from paceline.errors import MissingCapability, WeightsError
from paceline.local.patience import patient
from paceline.models.profiles import PROFILES
from paceline.models.quantised import quantised
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
PROFILE, TOKENS = "int8_w8a8", 24
GAP = 0.05
"""Largest mean difference of log-probs, nats, from bfloat16 and rounded activations. The rounded
weights of another policy differ by several nats.
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SimpleNamespace]:
    """A gateway with two workers that serve the demo's trained policy in int8, and its drafter
    unrounded.
    """
    config = GatewayConfig.model_validate(
        {
            "model": str(DEMO / "policy_trained"),
            "drafter": str(DEMO / "drafter_trained"),
            "run": {"id": "profile", "dir": str(tmp_path_factory.mktemp("profile"))},
            "addresses": {"gateway": "127.0.0.1:0", "http": "127.0.0.1:0"},
            "speculation": {"arms": ["off", "eagle:3_1_4"], "forced_arm": "eagle:3_1_4"},
            "canary": {"deadline_s": patient(30)},
            "engine": {
                "kind": "sglang",
                "workers": 2,
                "dtype": "bfloat16",
                "max_sequence_tokens": 256,
                "ready_deadline_s": patient(START_S),
                "sglang": {"profile": PROFILE},
            },
        }
    )
    async with (
        running(config) as (port, _),
        channel(f"127.0.0.1:{port}", SecurityConfig()) as connection,
    ):
        stub: Any = RolloutServiceStub(connection)
        yield SimpleNamespace(
            config=config,
            channel=connection,
            stub=stub,
            numbers=itertools.count(1),
            serving=VersionSet(profile=PROFILE),
        )


async def take(served: Any, versions: VersionSet) -> None:
    """Commit a set that passes, under the profile."""
    versions = VersionSet(versions.seq, versions.policy, versions.drafter, PROFILE)
    await commit(served, versions)
    served.serving = versions
    await until_serving(served, [(versions.policy, versions.drafter)] * 2)


async def said(served: Any, prompt: list[int]) -> list[Any]:
    sampling = tpb.SamplingParams(temperature=0, max_tokens=TOKENS, seed=1, ignore_eos=True)
    request = rpb.GenerateRequest(token_ids=rpb.TokenIds(ids=prompt), sampling=sampling)
    return [piece.chunk async for piece in served.stub.Generate(request, timeout=patient(120))]


async def all_said(served: Any) -> list[list[int]]:
    """Greedy tokens for all prompts in sequence, each in a batch of one."""
    found = []
    for prompt in prompts():
        chunks = await said(served, prompt)
        assert {span.number_format for one in chunks for span in one.draw_spans} == {PROFILE}
        found.append([token for one in chunks for token in one.token_ids])
    return found


def rounded_oracle(name: str) -> PreTrainedModel:
    """A policy of the demo in float32: its layers' matrices are rounded and put together again."""
    model = load_oracle(DEMO / name)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data.bfloat16()
            module.weight.data = quantised(weight, PROFILES[PROFILE]).whole()
    return model


def gap(model: PreTrainedModel, prompt: list[int], chunks: list[Any]) -> float:
    """Mean difference between reported log-probs and the model's, over the tokens of an answer,
    nats.
    """
    tokens = [token for one in chunks for token in one.token_ids]
    told = torch.tensor([value for one in chunks for value in one.behavior_logprobs])
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    return float((own - told).abs().mean())


async def versions_told(served: Any) -> set[str]:
    return {worker.health.versions.profile for worker in await workers(served)}


async def test_versions_serve_in_int8_from_the_storages_of_the_one_before(served: Any) -> None:
    start = await all_said(served)
    assert await versions_told(served) == {PROFILE}
    for name in ("policy_start", "policy_trained"):
        await take(served, await pushed(served, POLICY, demo_tensors(name)))
        oracle = rounded_oracle(name)
        for prompt in prompts():
            assert gap(oracle, prompt, await said(served, prompt)) < GAP
        assert (await all_said(served) == start) == (name == "policy_trained")
    assert await versions_told(served) == {PROFILE}


async def test_a_drafter_is_not_rounded_and_drafts(served: Any) -> None:
    await take(served, await pushed(served, DRAFTER, demo_tensors("drafter_trained")))
    chunks = await said(served, prompts()[0])
    assert chunks[-1].speculation.accepted_tokens > TOKENS // 4


async def test_a_set_that_the_canary_refuses_leaves_policy_and_profile(served: Any) -> None:
    before, serving = await all_said(served), served.serving
    broken = demo_tensors("policy_start")
    broken["model.norm.weight"] = filled(broken["model.norm.weight"], 3e38)
    bad = await pushed(served, POLICY, broken)
    with pytest.raises(WeightsError, match=r"the canary, refused set .*finite log-probs"):
        await commit(served, VersionSet(bad.seq, bad.policy, bad.drafter, PROFILE))
    await until_serving(served, [(serving.policy, serving.drafter)] * 2, START_S)
    assert await versions_told(served) == {PROFILE}
    assert await all_said(served) == before


async def test_a_set_of_another_profile_or_of_none_is_refused_by_name(served: Any) -> None:
    before = await all_said(served)
    found = await pushed(served, POLICY, demo_tensors("policy_start"))
    for other in ("", "fp8_channel"):
        with pytest.raises(MissingCapability, match=r"sglang engine lacks .*profiles"):
            await commit(served, VersionSet(found.seq, found.policy, found.drafter, other))
    assert await all_said(served) == before
    await take(served, found)
    assert await all_said(served) != before


async def test_numbers_that_are_infinite_in_the_engines_dtype_are_refused_at_the_push(
    served: Any,
) -> None:
    before = await all_said(served)
    overflowing = demo_tensors("policy_trained")
    name = "model.layers.1.mlp.down_proj.weight"
    overflowing[name] = filled(overflowing[name], 3.4e38)  # finite, but not in bfloat16
    with pytest.raises(WeightsError, match="numbers that are not finite in bfloat16"):
        await pushed(served, POLICY, overflowing)
    assert await all_said(served) == before
