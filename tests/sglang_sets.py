"""Pushes and requests for the tests of a gateway over SGLang."""

from __future__ import annotations

from typing import Any

import numpy as np
from integration.gateway.commands import lease
from sglang_served import DEMO
from transformers import AutoTokenizer
from whole_versions import build_manifest, push_weights

from paceline.tensors import NamedTensor, decode_safetensors, from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb

POLICY, DRAFTER = pb.WEIGHT_TARGET_POLICY, pb.WEIGHT_TARGET_DRAFTER
START_S = 180
QUESTIONS = ("48:36=", "91:35=")


def demo_tensors(name: str) -> dict[str, NamedTensor]:
    """Tensors of a checkpoint of the demo."""
    return decode_safetensors((DEMO / name / "model.safetensors").read_bytes())


def filled(tensor: NamedTensor, value: float) -> NamedTensor:
    """The tensor with one number in all places."""
    return from_numpy(tensor.name, np.full(tensor.shape, value, dtype=np.float32))


async def pushed(served: Any, target: int, tensors: dict[str, NamedTensor]) -> VersionSet:
    """The served set with the pushed tensors under a new version."""
    number = next(served.numbers)
    found = list(tensors.values())
    manifest = build_manifest(target, number, found, lm_head_hash=f"{number:016x}")
    await push_weights(served.channel, manifest, found, lease(served))
    if target == POLICY:
        return VersionSet(number, number, served.serving.drafter)
    return VersionSet(number, served.serving.policy, number)


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "policy_trained")
    return [tokenizer.encode(question) for question in QUESTIONS]
