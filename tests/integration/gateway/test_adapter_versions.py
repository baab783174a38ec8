"""Versions of adapters alone: canary trials, refusals, deltas, and mixtures with whole policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration.gateway.commands import commit, lease, until_serving, worker_versions
from integration.gateway.test_canary import tokens
from safetensors.torch import save
from torch import Tensor
from whole_versions import build_manifest, push_alone

from paceline.errors import WeightsError
from paceline.local.patience import patient
from paceline.models.adapters import DOWN, UP, AddedAdapters, MergedTensors, hash_of_start
from paceline.models.loading import read_tensors
from paceline.tensors import ADAPTERS, decode_safetensors
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY as POLICY
from paceline.weights import WeightSender
from paceline.weights.shares import check_share, held_whole

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
RANK, SCALE = 4, 2.0
TWO: dict[str, Any] = {
    "model": str(DEMO),
    "drafter": "ngram",
    "engine": {"kind": "embedded", "workers": 2, "max_sequence_tokens": 64},
}


def adapters(size: float = 0.2, moved: int = 0) -> dict[str, Tensor]:
    """Adapters of every query matrix; a step has changed `moved` values of each matrix."""
    draw = torch.Generator().manual_seed(5)
    found: dict[str, Tensor] = {}
    for name, weight in read_tensors(DEMO).items():
        if name.endswith("q_proj.weight"):
            stem = name.removesuffix(".weight")
            found[stem + DOWN] = size * torch.randn(RANK, weight.shape[1], generator=draw)
            found[stem + UP] = size * torch.randn(weight.shape[0], RANK, generator=draw)
    for one in found.values():
        one.view(-1)[:moved] += 0.5
    return found


def merged(added: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(MergedTensors(read_tensors(DEMO), added, SCALE))


async def push(
    served: Any, sender: WeightSender, version: int, tensors: dict[str, Tensor]
) -> tuple[str, int]:
    """The encoding of a push, and its bytes."""
    given = list(decode_safetensors(save(tensors)).values())
    alone = all(name.endswith((DOWN, UP)) for name in tensors)
    document = {ADAPTERS: AddedAdapters(SCALE, hash_of_start(DEMO)).text()} if alone else None
    manifest = build_manifest(
        POLICY, version, given, lm_head_hash=f"{version:016x}", metadata=document
    )
    whole = check_share(manifest, held_whole(given))
    report = await push_alone(sender, served.channel, whole, lease(served), patient(30))
    return report.encoding, report.bytes


@pytest.mark.slow
async def test_adapters_pass_the_canary_or_are_refused_and_those_before_them_serve_on(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**TWO) as served:
        sender = WeightSender("never")
        start, _ = await tokens(served, 1, 24)
        await push(served, sender, 2, adapters())
        await commit(served, VersionSet(1, 2, 0))
        assert await worker_versions(served) == [(2, 0), (2, 0)]
        said, versions = await tokens(served, 1, 24)
        assert versions == {2}
        assert said != start

        await push(served, sender, 3, adapters(size=1e18))  # finite, also after the addition
        with pytest.raises(WeightsError, match=r"canary, refused set 2 .*finite log-probs"):
            await commit(served, VersionSet(2, 3, 0))
        await until_serving(served, [(2, 0), (2, 0)])  # the canary has read its adapters again
        for seed in (1, 2, 3):
            drawn, versions = await tokens(served, seed, 24)
            assert versions == {2}
            assert seed > 1 or drawn == said

        await push(served, sender, 4, merged(adapters()))
        await commit(served, VersionSet(3, 4, 0))
        assert await tokens(served, 1, 24) == (said, {4})


@pytest.mark.slow
async def test_adapters_come_as_deltas_to_adapters_and_whole_beside_a_whole_policy(
    serve_gateway: Any,
) -> None:
    given = {
        1: merged({}),
        2: adapters(),
        3: adapters(moved=3),
        4: merged(adapters(moved=3)),
    }
    async with serve_gateway(**TWO) as served:
        sender, went, said = WeightSender(), {}, {}
        for version, tensors in given.items():
            went[version] = await push(served, sender, version, tensors)
            await commit(served, VersionSet(version, version, 0))
            said[version], versions = await tokens(served, 1, 24)
            assert versions == {version}
    assert [encoding for encoding, _ in went.values()] == ["full", "full", "sparse_delta", "full"]
    assert went[3][1] < went[2][1] / 16 < went[1][1] / 16
    assert said[3] == said[4]  # the delta's adapters, added, are the whole policy's bits
    assert len({tuple(said[version]) for version in (1, 2, 3)}) == 3
