"""Versions that arrive as deltas, served by the embedded engine under a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from integration.weight_receivers import CONTEXT, P, Receiver, receivers
from safetensors.torch import save
from torch import Tensor
from whole_versions import build_manifest, push_alone

from paceline.local.patience import patient
from paceline.models.config import read_config
from paceline.models.in_place import ServedModel, serve_staged, storages
from paceline.models.loading import read_tensors
from paceline.models.profiles import PROFILES, ROUNDED
from paceline.tensors import NamedTensor, decode_safetensors
from paceline.weights import WeightSender
from paceline.weights.shares import check_share, held_whole

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "policy_start"
VERSIONS = 3


def version(number: int) -> list[NamedTensor]:
    """The demo's start policy after `number` steps; each step moves one value in 400 of each
    matrix.
    """
    tensors = {name: one.clone() for name, one in read_tensors(DEMO).items()}
    for one in tensors.values():
        for step in range(1, number + 1):
            if one.ndim == 2:
                one.view(-1)[step::400] *= 1.5
    return list(decode_safetensors(save(tensors)).values())


async def pushed(receiver: Receiver, sender: WeightSender, number: int) -> str:
    """The encoding in which a version was sent."""
    given = version(number)
    whole = check_share(build_manifest(P, number, given), held_whole(given))
    report = await push_alone(sender, receiver.channel, whole, CONTEXT, patient(20))
    await receiver.commit(number, number, 0)
    return report.encoding


def served_bits(profile: str, paths: list[Path]) -> dict[str, Tensor]:
    """Storages after serving the versions of these directories, each over its predecessor."""
    config = read_config(DEMO)
    model = ServedModel(config, torch.float32, 64, PROFILES.get(profile), start=DEMO)
    weights = model.load(DEMO)
    for path in paths:
        serve_staged(weights, model.staged(path))
    return {name: one.view(torch.uint8).clone() for name, one in storages(weights).items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("profile", ["", *ROUNDED])
async def test_what_came_as_deltas_is_rounded_to_the_bits_of_what_came_whole(
    profile: str, tmp_path: Path
) -> None:
    if profile.startswith("int8"):
        pytest.importorskip("torchao", reason="torchao rounds to INT8: the extra `int8`")
    numbers = range(1, VERSIONS + 1)
    async with receivers(tmp_path / "delta") as one, receivers(tmp_path / "whole") as other:
        by_delta, whole = await one(), await other()
        sender = WeightSender()
        went = [await pushed(by_delta, sender, number) for number in numbers]
        assert went == ["full", "sparse_delta", "sparse_delta"]
        assert await pushed(whole, WeightSender("never"), VERSIONS) == "full"
        kept = [by_delta.spool.path(P, number) for number in numbers[-2:]]
        from_deltas = served_bits(profile, kept)
        from_whole = served_bits(profile, [whole.spool.path(P, VERSIONS)])
    assert from_deltas.keys() == from_whole.keys()
    for name, bits in from_deltas.items():
        assert torch.equal(bits, from_whole[name]), name
    before = served_bits(profile, [])
    assert any(not torch.equal(bits, before[name]) for name, bits in from_deltas.items())
