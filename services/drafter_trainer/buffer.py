"""Captured rows waiting to be learned from: bounded in samples and bytes, split into training and held-out.

Owns what is kept and what is drawn; not where rows come from (rank.py) nor how they are packed (batcher.py).
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataLoss
from paceline.models.config import ModelConfig
from paceline.streams import FeatureBatch

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class FeatureSample:
    """Rows of one finished request. R rows stand at tokens 0..R-1; the last token has none."""

    session: str
    step: int
    policy_version: int
    lm_head_hash: str
    hidden: Tensor  # [R, W] as captured, the last hidden_size columns the state after the final norm
    token_ids: Tensor  # [R + 1] int64
    generated: Tensor  # [R + 1] bool: tokens that may be a drafting target
    hidden_size: int  # H
    layers: str = "last"  # what a row holds, see CaptureSpec.layers
    traceparent: str = ""  # of the batch it came in

    @property
    def positions(self) -> int:
        """Training positions: each needs its row and the next one."""
        return self.hidden.shape[0] - 1

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.hidden.nbytes + self.token_ids.nbytes + self.generated.nbytes


def sample_from(batch: FeatureBatch, target: ModelConfig) -> FeatureSample:
    """Turns a stream entry into tensors. Raises DataLoss when nothing of `target` can be trained with it.

    Rows that another policy version computed than the last row's are not trained on: their head is another.
    """
    _check(batch, target)
    hidden = torch.frombuffer(bytearray(batch.hidden.data), dtype=_DTYPES[batch.hidden.dtype])
    if not torch.isfinite(hidden).all():
        raise DataLoss("a feature batch holds numbers that are not finite", seen=batch.session_id)
    # The last token has no row and no mask bit; it is always the policy's.
    generated = np.append(batch.mask, 1).astype(bool)
    generated[1:] &= batch.versions == batch.policy_version
    return FeatureSample(
        session=batch.session_id,
        step=batch.step,
        policy_version=batch.policy_version,
        lm_head_hash=batch.lm_head_hash,
        hidden=hidden.view(batch.rows, batch.hidden_size),
        token_ids=torch.as_tensor(batch.token_ids.astype(np.int64)),
        generated=torch.as_tensor(generated),
        hidden_size=target.hidden_size,
        layers=batch.layers,
    )


def _check(batch: FeatureBatch, target: ModelConfig) -> None:
    """Raises DataLoss when the batch does not fit the policy."""
    if batch.rows < 2:
        raise DataLoss("a feature batch is too short to train on", seen=f"{batch.rows} rows", allowed="at least 2")
    names = batch.layers.split(",")
    if names[-1] != "last" or batch.convention != "post_norm":
        raise DataLoss(
            "rows of another layer", seen=(batch.layers, batch.convention), allowed=("..., last", "post_norm")
        )
    if batch.hidden_size != len(names) * target.hidden_size:
        raise DataLoss("rows of another width", seen=batch.hidden_size, allowed=len(names) * target.hidden_size)
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= target.vocab_size:
        seen = (int(batch.token_ids.min()), int(batch.token_ids.max()))
        raise DataLoss("tokens of another vocabulary", seen=seen, allowed=f"0 to {target.vocab_size - 1}")
    if (np.diff(batch.positions) != 1).any():
        raise DataLoss("rows of a batch do not follow each other", seen=batch.session_id)


class FeatureBuffer:
    """Newest samples first to stay. One in `heldout_every` sessions is held out and never trained on."""

    def __init__(
        self, *, max_samples: int, byte_budget: int, heldout_every: int, heldout_samples: int, seed: int
    ) -> None:
        self._train: deque[FeatureSample] = deque()
        self._heldout: deque[FeatureSample] = deque(maxlen=heldout_samples)
        self._max_samples, self._byte_budget = max_samples, byte_budget
        self._heldout_every = heldout_every
        self._random = np.random.default_rng(seed)
        self.nbytes = 0
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._train)

    @property
    def tokens(self) -> int:
        """Training positions held."""
        return sum(sample.positions for sample in self._train)

    def tokens_of(self, known: Container[str]) -> int:
        """Training positions held of the `known` policy heads."""
        return sum(sample.positions for sample in self._train if sample.lm_head_hash in known)

    def add(self, sample: FeatureSample) -> None:
        """Keeps a sample; the oldest go when samples or bytes exceed the budget."""
        if zlib.crc32(sample.session.encode()) % self._heldout_every == 0:
            self._heldout.append(sample)
            return
        self._train.append(sample)
        self.nbytes += sample.nbytes
        while len(self._train) > self._max_samples or self.nbytes > self._byte_budget:
            self._drop_oldest("evicted")

    def forget(self, keep: Callable[[FeatureSample], bool], reason: str) -> None:
        """Drops the training samples that `keep` refuses, and counts them under `reason`."""
        for _ in range(len(self._train)):
            sample = self._train.popleft()
            if keep(sample):
                self._train.append(sample)
            else:
                self.nbytes -= sample.nbytes
                self.dropped[reason] += 1

    def draw(self, tokens: int, *, recency: float, known: Container[str], at_least: int = 1) -> list[FeatureSample]:
        """Samples of one of the `known` policy heads worth about `tokens` positions, without replacement.

        At least `at_least` samples: heads with fewer are left out.

        A head is drawn with probability proportional to recency ** (heads newer than it) * its positions, so that one
        micro-batch needs one head and old versions fade. Empty when nothing usable is held.
        """
        by_head: dict[str, list[FeatureSample]] = {}
        for sample in self._train:
            if sample.lm_head_hash in known:
                by_head.setdefault(sample.lm_head_hash, []).append(sample)
        enough = [group for group in by_head.values() if len(group) >= at_least]
        if not enough:
            return []
        groups = sorted(enough, key=lambda group: max(s.policy_version for s in group), reverse=True)
        weights = np.array([recency**age * sum(s.positions for s in group) for age, group in enumerate(groups)])
        group = groups[int(self._random.choice(len(groups), p=weights / weights.sum()))]
        drawn, room = list[FeatureSample](), tokens
        for index in self._random.permutation(len(group)):
            room -= group[index].positions
            if len(drawn) >= at_least and room < 0:
                break
            drawn.append(group[index])
        return drawn

    def heldout(self, known_heads: Iterable[str]) -> list[FeatureSample]:
        """Held-out samples of the newest policy version that has some, oldest first."""
        known = set(known_heads)
        usable = [sample for sample in self._heldout if sample.lm_head_hash in known]
        newest = max((sample.policy_version for sample in usable), default=0)
        return [sample for sample in usable if sample.policy_version == newest]

    def _drop_oldest(self, reason: str) -> None:
        self.nbytes -= self._train.popleft().nbytes
        self.dropped[reason] += 1
