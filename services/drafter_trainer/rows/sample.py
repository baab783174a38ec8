"""Makes a sample from the rows of a finished request, and packs windows of samples into rows. Reads
the policy's embedding and head, which a drafter shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from paceline.errors import DataLoss, InvalidInput, PacelineError
from paceline.models.config import ModelConfig
from paceline.models.loading import weight_files
from paceline.speculators.packed import TOP, PackedRow, likeliest
from paceline.streams import FeatureBatch
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


_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(slots=True)
class FeatureSample:
    """Rows of one finished request: R rows at tokens 0..R-1; the last token has none."""

    session: str
    step: int
    policy_version: int
    lm_head_hash: str
    # [R, W] as captured (engines: bfloat16); the last hidden_size columns are the state after the
    # final norm
    hidden: Tensor
    token_ids: Tensor  # [R + 1] int64
    generated: Tensor  # [R + 1] bool: tokens that may be a drafting target
    hidden_size: int  # H
    layers: str = "last"  # content of a row, see CaptureSpec.layers
    group: str = ""  # group of siblings; their sequences may begin alike
    temperature: float = 1.0  # of the draws
    traceparent: str = ""  # of the stream entry
    # int32 and fp32 [R, k], see PackedRow; None until `teach`
    top: tuple[Tensor, Tensor] | None = None

    @property
    def siblings(self) -> str:
        """Name of its group; its own name without a group."""
        return self.group or self.session

    @property
    def positions(self) -> int:
        """Training positions of the sequence: each needs its row and the next row."""
        return self.hidden.shape[0] - 1

    @property
    def targets(self) -> int:
        """Drafting targets of the sequence: drawn tokens from the third on."""
        return len(self.drawn)

    @property
    def drawn(self) -> Tensor:
        """int64: the drafting targets."""
        return self.token_ids[2:][self.generated[2:]]

    @property
    def nbytes(self) -> int:
        """Size in bytes, with its targets."""
        targets = len(self.hidden) * TOP * 8
        return self.hidden.nbytes + self.token_ids.nbytes + self.generated.nbytes + targets

    def teach(self, head: PolicyHead) -> None:
        """Computes its targets, once for all its later uses."""
        if self.top is None:
            rows = self.generated[1:].nonzero()[:, 0]
            found = likeliest(self.hidden[rows, -self.hidden_size :].float(), head.lm_head)
            tokens, logp = (
                one.new_zeros(len(self.hidden), one.shape[1]).index_copy_(0, rows, one)
                for one in found
            )
            self.top = tokens, logp

    def cut(self, start: int, length: int) -> FeatureSample:
        """A copy of training positions start .. start + length - 1."""
        rows = length + 1
        part = slice(start, start + rows)
        return replace(
            self,
            hidden=self.hidden[part].clone(),
            token_ids=self.token_ids[start : start + rows + 1].clone(),
            generated=self.generated[start : start + rows + 1].clone(),
            top=None if self.top is None else (self.top[0][part], self.top[1][part]),
        )

    def window(self, length: int, random: np.random.Generator) -> FeatureSample:
        """The sample itself, or if it is longer, a stretch of `length` positions around a random
        target.
        """
        room = self.positions - length
        if room <= 0:
            return self
        targets = self.generated[2:].nonzero()[:, 0]
        target = int(targets[random.integers(len(targets))])
        return self.cut(
            int(random.integers(max(0, target - length + 1), min(target, room) + 1)), length
        )


def sample_from(batch: FeatureBatch, target: ModelConfig) -> FeatureSample:
    """Turns a stream entry into tensors. Raises DataLoss when nothing in it can train a drafter of
    `target`.

    Rows of another policy version than the last row's are not trained on: they need another head,
    and a batch names the last one's only.
    """
    _check(batch, target)
    rows = batch.hidden
    hidden = torch.frombuffer(bytearray(rows.data), dtype=_DTYPES[rows.dtype]).view(rows.shape)
    if not torch.isfinite(hidden).all():
        raise DataLoss("a feature batch holds numbers that are not finite", seen=batch.session_id)
    # The last token has no row and no mask bit; the policy always drew it.
    generated = np.append(batch.mask, 1).astype(bool)
    generated[1:] &= batch.versions == batch.policy_version
    return FeatureSample(
        session=batch.session_id,
        step=batch.step,
        policy_version=batch.policy_version,
        lm_head_hash=batch.lm_head_hash,
        hidden=hidden,
        token_ids=torch.as_tensor(batch.token_ids.astype(np.int64)),
        generated=torch.as_tensor(generated),
        hidden_size=target.hidden_size,
        layers=batch.layers,
        group=batch.group_id,
        temperature=batch.temperature,
    )


def _check(batch: FeatureBatch, target: ModelConfig) -> None:
    """Raises DataLoss when the batch does not match the policy."""
    if batch.rows < 2:
        raise DataLoss("a feature batch is too short", seen=f"{batch.rows} rows", allowed="2")

    names = batch.layers.split(",")
    if names[-1] != "last" or batch.convention != "post_norm":
        found = (batch.layers, batch.convention)
        raise DataLoss("rows of another layer", seen=found, allowed=("..., last", "post_norm"))

    width = len(names) * target.hidden_size
    if batch.hidden_size != width:
        raise DataLoss("rows of another width", seen=batch.hidden_size, allowed=width)

    tokens = batch.token_ids
    if tokens.min() < 0 or tokens.max() >= target.vocab_size:
        seen = (int(tokens.min()), int(tokens.max()))
        allowed = f"0 to {target.vocab_size - 1}"
        raise DataLoss("tokens of another vocabulary", seen=seen, allowed=allowed)

    if (np.diff(batch.positions) != 1).any():
        raise DataLoss("rows of a batch do not follow each other", seen=batch.session_id)


def pack(samples: Sequence[FeatureSample], *, window: int) -> PackedRow:
    """One row from samples of one head; of a sample longer than `window` positions, the last
    `window` are used.

    A document is a sample's sequence.
    """
    parts = list[dict[str, Tensor]]()
    for number, sample in enumerate(samples):
        if sample.positions > window:
            sample = sample.cut(sample.positions - window, window)
        here, hidden = torch.arange(sample.positions), sample.hidden.float()
        parts.append(
            {
                "states": hidden[:-1],
                "next_states": hidden[1:, -sample.hidden_size :].detach(),  # a target
                "next_tokens": sample.token_ids[1:-1],
                "draft_tokens": sample.token_ids[2:],
                "positions": here,
                "documents": torch.full_like(here, number),
                "valid": sample.generated[2:],
            }
        )
        if sample.top is not None:
            tokens, logp = (one[1:] for one in sample.top)
            parts[-1] |= {"top_tokens": tokens, "top_logp": logp}

    return PackedRow(
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]},
        lm_head_hash=samples[0].lm_head_hash,
        layers=samples[0].layers,
    )
