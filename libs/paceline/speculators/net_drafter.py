"""Drafts with a network: the common part of all such drafters, their weights and their chain."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.models import decoder, loading, sampling
from paceline.speculators import base
from paceline.speculators.net import DraftNet

_DEPTH_TIE = 1e-5
"""Subtracted from a log score per level, so that a parent precedes children of equal score."""

DRAWN_FROM = 64
"""A draft with noise is one of the network's this many likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Beam:
    """The expanded nodes of a level."""

    level: int
    """1: children of the root."""
    tokens: Tensor
    """int64 [B, k]"""
    sources: Tensor
    """int64 [B, k]: index of each parent in the beam of the previous level; 0 on level 1."""


def grow_tree(
    first: Tensor, expand: Callable[[Beam], Tensor], shape: base.DraftShape
) -> base.Drafts:
    """The drafter's most likely tree of `shape`.

    first [B, V]: log-probs of the root's children; expand: log-probs [B, k, V] of the children of a
    beam's nodes. Stops when no row has a node above shape.floor. Returns at most shape.drafts nodes
    a row.
    """
    batch, topk = first.shape[0], min(shape.topk, first.shape[-1])
    top = first.topk(topk, dim=-1)
    beam = Beam(1, top.indices, torch.zeros_like(top.indices))
    scores = top.values
    ids = torch.arange(1, topk + 1, device=first.device).expand(batch, topk)
    offset = topk
    levels = [(top.indices, scores, torch.zeros_like(top.indices))]
    for level in range(2, shape.steps + 1):
        if shape.floor > 0 and bool(scores.max() < math.log(shape.floor)):
            break
        top = expand(beam).topk(topk, dim=-1)
        children = (scores[:, :, None] + top.values - _DEPTH_TIE).flatten(1)
        tokens = top.indices.flatten(1)
        levels.append((tokens, children, ids[:, :, None].expand(batch, topk, topk).flatten(1)))
        best = children.topk(topk, dim=-1)
        beam = Beam(level, tokens.gather(1, best.indices), best.indices // topk)
        scores, ids, offset = best.values, best.indices + offset + 1, offset + topk * topk

    tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    return _most_likely(tokens, scores, parents, shape.drafts)


def _most_likely(tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> base.Drafts:
    """The best `nodes` of all candidates [B, C], in their order; parents are ids, 0 the root, i + 1
    candidate i.
    """
    chosen = scores.topk(min(nodes, scores.shape[1]), dim=1).indices.sort(dim=1).values
    renamed = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.int64, device=scores.device)
    names = torch.arange(1, chosen.shape[1] + 1, device=scores.device).expand_as(chosen)
    renamed.scatter_(1, chosen + 1, names)
    return base.Drafts(
        tokens.gather(1, chosen),
        shares_of(scores.gather(1, chosen)),
        renamed.gather(1, parents.gather(1, chosen)),
    )


def shares_of(log_scores: Tensor) -> Tensor:
    """Scores in (0, 1] of log scores, float32."""
    return log_scores.exp().clamp_(torch.finfo(torch.float32).tiny, 1.0)


Net = TypeVar("Net", bound=DraftNet)


class NetDrafter(base.Speculator, ABC, Generic[Net]):
    """A speculator with weights (see speculators/base.py for the methods).

    Ids below are draft ids: rows of the drafter's head. They are token ids unless the drafter has
    its own vocabulary.
    """

    trainable = True
    uses_noise = True
    net: type[Net]
    """Its network's class."""
    _drafted: Tensor | None = None
    """int64 [Vd]: tokens of the draft ids; None: each id is its own token."""

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        """Raises the errors of DraftNet.read and fresh."""
        self._target = setup.target
        self._device, self._dtype = setup.target.head.device, setup.dtype
        target = setup.target.config
        if setup.directory:
            self._net = self.net.read(setup.directory, target)
        else:
            self._net = self.net.fresh(target, self.net.Options(), setup.seed)

    @abstractmethod
    def _serve(self, net: Net) -> None:
        """Prepares the network's weights for inference and drafts with them."""

    def _token_ids(self, draft_ids: Tensor) -> Tensor:
        """Token ids of draft ids, same shape."""
        return draft_ids if self._drafted is None else self._drafted[draft_ids]

    @property
    def capture(self) -> base.CaptureSpec:
        """See Speculator.capture."""
        return self._net.capture

    def bind(self, target: decoder.DecoderWeights) -> None:
        """Uses embed_tokens and lm_head of this target."""
        self._target = target
        self._serve(self._net)

    def load_state(self, directory: Path) -> Net:
        """A version's weights, checked. Raises WeightsError, DataLoss or InvalidInput.

        A directory without config.json has the serving shape.
        """
        if (directory / "config.json").is_file():
            return self.net.read(directory, self._target.config)
        net = self._net.twin()
        net.load_tensors(loading.read_tensors(directory))
        return net

    def commit_state(self, state: object) -> None:
        """Serves the result of load_state."""
        assert isinstance(state, self.net)
        self._serve(state)

    def _chain(
        self,
        batch: base.DraftBatch,
        shape: base.DraftShape,
        logits: Tensor,
        advance: Callable[[int, Tensor], Tensor],
    ) -> base.Drafts:
        """A chain of the highest log scores, from the logits of the first draft. It ends at the
        first draft that no sequence reaches with `shape.floor` or more.

        `advance`: (number of the draft, token ids [B] before it) -> its logits [B, draft ids].
        """

        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for step in range(shape.steps):
            if step:
                logits = advance(step, tokens[-1])
            score, draft_ids = self._log_scores(batch, logits, step).max(dim=-1)
            tokens.append(self._token_ids(draft_ids))
            scores.append(scores[-1] + score if scores else score)
            if shape.floor > 0 and bool(scores[-1].max() < math.log(shape.floor)):
                break
        return base.Drafts(torch.stack(tokens, dim=1), shares_of(torch.stack(scores, dim=1)))

    def _log_scores(
        self, batch: base.DraftBatch, logits: Tensor, levels: int | Tensor = 0
    ) -> Tensor:
        """Log-probs of drafts from logits [B, .., draft ids], same shape; levels: how many drafts
        precede each draft, int64 of a shape that broadcasts to [B, ..].

        If requests draw with noise, these are log-probs of the perturbed values, and the highest
        is the draw of a policy that equals the drafter (Gumbel coupling: Daliri, Musco, Suresh
        2024, arXiv 2408.07978). Tokens that are unlikely without the noise have -inf.
        """
        logits, draws = logits.float(), batch.draws
        if draws is None or draws.all_greedy:
            return torch.log_softmax(logits, dim=-1)
        rows = logits.flatten(0, -2)
        lengths = torch.tensor(batch.lengths, device=rows.device)
        lengths = lengths.view(-1, *[1] * (logits.dim() - 2))
        positions = (lengths + levels).expand(logits.shape[:-1]).reshape(-1)
        owners = torch.arange(len(rows), device=rows.device) * len(lengths) // len(rows)
        columns, scores = sampling.perturbed_scores(
            rows, positions, draws.rows(owners), DRAWN_FROM, self._drafted
        )
        found = torch.full_like(rows, -torch.inf)
        found.scatter_(1, columns, torch.log_softmax(scores, dim=-1).float())
        return found.view(logits.shape)
