"""Applies grammars to the trees that SGLang verifies, identically on every rank.

SGLang's own grammars are off: they mask the draws of SGLang's sampler, but the plugin draws
instead. With overlap scheduling, the device may have drawn tokens that no request holds yet. These
tokens are needed before the mask is computed, so such a round waits for the previous round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.services.rollout_gateway.engines.requests.grammars import (
    Allowed,
    GrammarMasks,
    forbid_,
)
from paceline.services.rollout_gateway.engines.requests.json_schema import GrammarFault
from paceline.services.rollout_gateway.engines.requests.structures import Structure
from paceline.services.rollout_gateway.engines.sglang.plugin.tracked import Tracked

FAULT_BYTES = 1024
"""Longest error message about a grammar that rank 0 broadcasts, in bytes."""


def asks(tracked: Tracked | None) -> bool:
    """Whether a row's draws follow a grammar."""
    return tracked is not None and tracked.request.sampling.structured


class TreeGrammars(GrammarMasks):
    """Masks logits before the draw."""

    def __init__(self, config: ModelConfig, model_dir: Path, rank: int, tp_group: Any) -> None:
        super().__init__(config, model_dir)
        self._rank = rank
        self._tp_group = tp_group  # None with a single rank

    def mask_(
        self,
        tracked: Sequence[Tracked | None],
        logits: Tensor,
        firsts: Sequence[int],
        token_ids: Tensor,
        parents: Tensor | None,
    ) -> None:
        """Set forbidden tokens to -inf in logits [B * N, V], in place.

        firsts [B]: absolute position of the token drawn at each root. token_ids int64 [B, N] and
        parents: the nodes; a draft that a fault leaves unmasked gets token -1. A request that
        cannot continue gets its error set, and its row stays unmasked.
        """
        width = token_ids.shape[1]
        above = torch.zeros_like(token_ids) if parents is None else parents
        unreached = above < 0  # the roots, and nodes outside every child list
        tokens = token_ids.masked_fill(unreached, -1).tolist()
        places: list[int] = []
        masks: list[Allowed] = []
        for row, one in enumerate(tracked):
            if one is None or not asks(one) or not self._stands(one, firsts[row]):
                continue
            marked = self.node_masks(one.sequence, tokens[row], above[row].tolist())
            if lost := marked.lost(width):
                token_ids[row, torch.tensor(lost, device=token_ids.device)] = -1
            places += [row * width + node for node in marked.found]
            masks += marked.found.values()

        if places:
            forbid_(logits, torch.tensor(places, device=logits.device), masks)

    def _stands(self, tracked: Tracked, first: int) -> bool:
        """Advance the matcher to the position of the draw; False when no draw there counts."""
        sequence, ahead = tracked.sequence, tracked.ahead(first)
        repeats = first - len(tracked.request.prompt) < len(sequence.tokens)
        ended = any(token in sequence.stop_ids for token in ahead)
        if repeats or ended or sequence.error:
            return False
        try:
            self.follow(sequence, ahead)
        except GrammarFault as fault:
            sequence.error = self.error_of(sequence, fault)
            return False
        return True

    def _agreed(self, structure: Structure, grammar: str) -> str:
        if self._tp_group is None:
            return self._judged(structure, grammar)
        told = torch.zeros(FAULT_BYTES, dtype=torch.uint8)
        if self._rank == 0:
            fault = self._judged(structure, grammar).encode()[:FAULT_BYTES]
            told[: len(fault)] = torch.tensor(list(fault), dtype=torch.uint8)
        group = self._tp_group
        torch.distributed.broadcast(told, src=group.first_rank, group=group.cpu_group)
        return bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")
