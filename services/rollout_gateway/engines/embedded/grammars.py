"""Grammar masks for the block of nodes that the embedded engine forwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes
from paceline.services.rollout_gateway.engines.nouns import Finish
from paceline.services.rollout_gateway.engines.requests.grammars import (
    Allowed,
    GrammarMasks,
    forbid_,
)
from paceline.services.rollout_gateway.engines.requests.json_schema import GrammarFault
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


class Grammars(GrammarMasks):
    """Masks the logits of rounds."""

    def advance(self, rows: Iterable[RunningSequence]) -> None:
        """Advance each grammar over the response's new tokens.

        A response that violates its grammar gets its finish and error set; other rows are
        unaffected.
        """
        for sequence in rows:
            if sequence.request.sampling.structured:
                try:
                    self.follow(sequence)
                except GrammarFault as fault:
                    sequence.finish = Finish.ERROR
                    sequence.error = self.error_of(sequence, fault)

    def mask_(self, rows: Sequence[RunningSequence], nodes: Nodes, logits: Tensor) -> None:
        """Set the logits [N, V] of forbidden tokens to -inf at the forwarded nodes; rows as given
        to `advance`.

        Nodes without an allowed path to them stay unchanged. If a fault prevents the masks of some
        drafts, the tokens of these drafts become -1. They are not followed, and the request
        continues without them.
        """
        asking = [row for row, sequence in enumerate(rows) if sequence.request.sampling.structured]
        if not asking:
            return
        index = torch.tensor(asking, device=logits.device)
        tokens = nodes.tokens[index].tolist()
        parents = nodes.every_parent[index].tolist()
        places: list[int] = []
        masks: list[Allowed] = []
        for row, drafts, above in zip(asking, tokens, parents, strict=True):
            marked = self.node_masks(rows[row], drafts, above)
            if lost := marked.lost(nodes.width):
                nodes.tokens[row, torch.tensor(lost, device=logits.device)] = -1
            places += [row * nodes.width + node for node in marked.found]
            masks += marked.found.values()

        place = torch.tensor(places, device=logits.device)
        if nodes.kept is not None:
            # kept ascends and includes every node with a mask
            place = torch.searchsorted(nodes.kept, place)
        forbid_(logits, place, masks)
