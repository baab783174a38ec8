"""Reads the policy's embedding and head, which a drafter shares."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.errors import InvalidInput, PacelineError
from paceline.models.config import ModelConfig
from paceline.models.loading import weight_files
from paceline.tensors import head_hash
from paceline.weights.manifest import check_spooled

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class PolicyHead:
    """The tensors that the drafter shares with one policy version; frozen."""

    hash: str
    policy_version: int
    embed_tokens: Tensor  # [V, H] fp32
    lm_head: Tensor  # [V, H] fp32


def load_policy_head(path: Path, policy_version: int) -> PolicyHead:
    """Reads embed_tokens and lm_head from a checkpoint or spool directory.

    The hash covers the head's bytes in the file, as in the engine. A tied checkpoint has no
    lm_head; its embedding is the head. Raises InvalidInput when there is no embedding.
    """
    tensors: dict[str, Tensor] = {}
    files = weight_files(path)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in set(opened.keys()) & {EMBED, HEAD}:
                tensors[name] = opened.get_tensor(name)

    if EMBED not in tensors:
        seen = [file.name for file in files]
        raise InvalidInput(f"no {EMBED} in {path}", seen=seen, allowed="a checkpoint with it")

    head = tensors.get(HEAD, tensors[EMBED]).contiguous()
    raw = head.view(torch.uint8).numpy().tobytes()
    return PolicyHead(head_hash(raw), policy_version, tensors[EMBED].float(), head.float())


def read_spooled_head(path: Path, policy_version: int, target: ModelConfig) -> PolicyHead | None:
    """The head of a spooled version, checked against its hashes and the target's shape. None if
    newer versions have removed it from the spool, before or during the read.

    Raises DataLoss for a damaged version, InvalidInput for a head of another shape.
    """
    try:
        check_spooled(path)
        head = load_policy_head(path, policy_version)
    except (OSError, PacelineError):
        if path.is_dir():
            raise
        return None
    shape, allowed = tuple(head.lm_head.shape), (target.vocab_size, target.hidden_size)
    if shape != allowed or tuple(head.embed_tokens.shape) != allowed:
        raise InvalidInput("a policy head of another shape", seen=shape, allowed=allowed)
    return head
