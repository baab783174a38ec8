"""Draws tokens inside SGLang by Paceline's sampling rule and by grammars.

SGLang's own grammars are off: they mask the draws of SGLang's sampler, but the plugin draws
instead. With overlap scheduling, the device may have drawn tokens that no request holds yet. These
tokens are needed before the mask is computed, so such a round waits for the previous round.

Every draw is x = argmax(logits / T + Gumbel(seed, absolute position)), as in
paceline.models.sampling. Verification follows the child node that equals x and ends where no child
matches. A tree of any shape and no tree at all therefore give the same tokens. The draft tree does
not depend on the draws, so verification is exact for any tree. This module owns no SGLang state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.models.sampling import Draw, top_alternatives
from paceline.services.rollout_gateway.engines.requests import draws, grammars, structures
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy
from paceline.services.rollout_gateway.engines.sglang.plugin import capture
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import (
    Alternatives,
    Drawn,
    Tracked,
)
from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import to_pinned

FAULT_BYTES = 1024
"""Longest error message about a grammar that rank 0 broadcasts, in bytes."""


def asks(tracked: Tracked | None) -> bool:
    """Whether a row's draws follow a grammar."""
    return tracked is not None and tracked.request.sampling.structured


class TreeGrammars(grammars.GrammarMasks):
    """Masks logits before the draw."""

    def __init__(self, config: ModelConfig, model_dir: Path, rank: int, tp_group: Any) -> None:
        super().__init__(config, model_dir)
        self._rank = rank
        self._tp_group = tp_group  # None with a single rank

    def mask_draws_(
        self,
        tracked: Sequence[Tracked | None],
        logits: Tensor,
        firsts: Sequence[int],
        token_ids: Tensor,
        parents: Tensor | None,
    ) -> None:
        """Set forbidden tokens to -inf in logits [B * N, V], in place; see GrammarMasks.mask_.

        firsts [B]: absolute position of the token drawn at each root. token_ids int64 [B, N] and
        parents: the nodes, see parents_of. A request that cannot continue gets its error set, and
        its row stays unmasked.
        """
        asking = {row: one for row, one in enumerate(tracked) if one is not None and asks(one)}
        going = [row for row, one in asking.items() if self._advance_to(one, firsts[row])]
        rows = {row: asking[row].sequence for row in going}
        above = torch.zeros_like(token_ids) if parents is None else parents
        self.mask_(rows, token_ids, above, logits)

    def _advance_to(self, tracked: Tracked, first: int) -> bool:
        """Advance the matcher to the position of the draw; False when no draw there counts."""
        sequence, ahead = tracked.sequence, tracked.ahead(first)
        repeats = first - len(tracked.request.prompt) < len(sequence.tokens)
        ended = any(token in sequence.stop_ids for token in ahead)
        return not (repeats or ended or sequence.error) and self.follow(sequence, ahead)

    def _judged(self, structure: structures.Structure, grammar: str) -> str:
        if self._tp_group is None:
            return super()._judged(structure, grammar)
        fault_bytes = torch.zeros(FAULT_BYTES, dtype=torch.uint8)
        if self._rank == 0:
            fault = super()._judged(structure, grammar).encode()[:FAULT_BYTES]
            fault_bytes[: len(fault)] = torch.tensor(list(fault), dtype=torch.uint8)
        group = self._tp_group
        torch.distributed.broadcast(fault_bytes, src=group.first_rank, group=group.cpu_group)
        return bytes(fault_bytes.tolist()).rstrip(b"\0").decode(errors="replace")


def accepted_path(
    drawn: Tensor, candidates: Tensor, parents: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """From the root, follow the child node that equals the draw at its parent.

    drawn, candidates [B, N]: the draw at each node and the node's own token (column 0 is the root).
    parents [B, N]: see parents_of. depth: longest path allowed, the root included. Returns the
    nodes of the path int64 [B, depth], -1 after its end, and their number int64 [B], the root
    included. This number is also the number of emitted tokens.
    """
    path, drafts = draws.follow(drawn, candidates, parents)
    lengths = (drafts + 1).clamp(max=depth)
    path = torch.nn.functional.pad(path, (0, max(depth - path.shape[1], 0)))[:, :depth]
    behind = torch.arange(depth, device=path.device) >= lengths[:, None]
    return path.masked_fill(behind, -1), lengths


def parents_of(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Local parent of each node [B, N]; -1 for the root and for nodes outside every child list.

    next_token, next_sibling [B, N]: local node of the first child and of the next sibling, -1 for
    none. A parent has a smaller index than its children.
    """
    batch, nodes = next_token.shape
    # An extra column absorbs the writes of lists that have ended.
    parents = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=next_token.device)
    owners = torch.arange(nodes, device=next_token.device).expand(batch, nodes)
    child = next_token.long()
    for _ in range(max(nodes - 1, 0)):
        parents.scatter_(1, torch.where(child >= 0, child, nodes), owners)
        child = torch.where(child >= 0, next_sibling.long().gather(1, child.clamp(min=0)), -1)
        if child.device.type == "cpu" and not bool((child >= 0).any()):
            break
    return parents[:, :nodes]


class PendingDraws:
    """Draws of one round along the accepted paths, while they are copied to the host."""

    def __init__(
        self,
        rows: Sequence[Tracked | None],
        drawn: Draw,
        logits: Tensor,
        firsts: Tensor,
        path: Tensor,
        lengths: Tensor,
        origin: DrawnBy,
    ) -> None:
        """Starts the copy without waiting; rows that request top log-probs wait for the device.

        drawn [B * N], logits [B * N, V]; firsts [B]: absolute position of the first drawn token;
        path [B, D] and lengths [B]: see accepted_path.
        """
        self._rows, self._origin = rows, origin
        nodes = len(drawn.tokens) // len(path)
        flat = path.clamp(min=0) + torch.arange(len(path), device=path.device)[:, None] * nodes
        along = (drawn.tokens[flat], drawn.logprobs[flat], drawn.gaps[flat])
        self._columns: tuple[Tensor, ...] = (firsts, lengths, *along)
        self._alternatives = _alternatives(rows, logits, flat, lengths)
        self._copied: Any = None  # CUDA event
        if firsts.device.type == "cuda":
            self._columns = tuple(map(to_pinned, self._columns))
            self._copied = torch.cuda.Event()
            self._copied.record()

    def settle(self) -> None:
        """Record the draws in their requests; waits until the copy has ended."""
        if self._copied is not None:
            self._copied.synchronize()
        for row, (first, length, tokens, logprobs, gaps) in enumerate(
            zip(*(column.tolist() for column in self._columns), strict=True)
        ):
            tracked = self._rows[row]
            if tracked is None:
                continue
            alternatives = self._alternatives.get(row, [()] * length)
            for index in range(length):
                draw = (tokens[index], logprobs[index], gaps[index])
                accepted = index < length - 1
                drawn = Drawn(*draw, self._origin, alternatives[index], accepted)
                tracked.record(first + index, drawn)


def _alternatives(
    rows: Sequence[Tracked | None], logits: Tensor, flat: Tensor, lengths: Tensor
) -> dict[int, list[Alternatives]]:
    """Most likely tokens of the rows that request top log-probs.

    Only such rows wait for the device.
    """
    found: dict[int, list[Alternatives]] = {}
    for row, tracked in enumerate(rows):
        wanted = tracked.request.sampling.top_logprobs if tracked is not None else 0
        if not wanted or tracked is None:
            continue
        chosen = logits[flat[row, : int(lengths[row])]]
        found[row] = top_alternatives(chosen, tracked.request.sampling.temperature, wanted)
    return found


def sample_hook(
    plugin: Any,
    original: Any,
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    positions: Tensor,
) -> Tensor:
    """AROUND Sampler.forward: draw one token per row after a prefill or a round without drafts."""
    batch = plugin.batch
    logits = logits_output.next_token_logits
    if batch is None or logits.shape[0] != len(batch.reqs):  # a draft model's own sampling
        asked = (return_logprob, top_logprobs_nums, token_ids_logprobs)
        return original(sampler, logits_output, sampling_info, *asked, positions)

    ready = sampler._preprocess_logits(logits, sampling_info)
    # the request's last token
    roots = torch.zeros(len(batch.reqs), 1, dtype=torch.int64, device=logits.device)
    drawn, tracked = plugin.draw(batch.reqs, ready, positions + 1, roots)
    lengths, firsts = torch.ones_like(roots[:, 0]), positions.long() + 1
    plugin.keep(PendingDraws(tracked, drawn, logits, firsts, roots, lengths, plugin.origin))
    return drawn.tokens


def verify_hook(
    plugin: Any,
    original: Any,
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """AROUND eagle_sample: select the accepted nodes of each tree and the token after each node.

    Returns predict int32 [B * N] and the number of accepted tokens, bonus token included, int32
    [B]. The third result is the global nodes of the path int32 [B, D], -1 after its end.
    """
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, *args, **kwargs)
    size, nodes = len(batch.reqs), verify_input.draft_token_num
    logits = logits_output.next_token_logits
    positions = verify_input.positions.long()
    candidates = verify_input.draft_token.view(size, nodes).to(torch.int64, copy=True)
    lists = (verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
    parents = parents_of(*(part.view(size, nodes) for part in lists))
    drawn, tracked = plugin.draw(batch.reqs, logits, positions + 1, candidates, parents)
    taken = drawn.tokens.view(size, nodes)
    path, lengths = accepted_path(taken, candidates, parents, verify_input.max_tree_depth)
    starts = torch.arange(size, device=path.device)[:, None] * nodes
    index = torch.where(path >= 0, path + starts, -1)
    outcome = (drawn.tokens.int(), lengths.int(), index.int())
    if plugin.tp_group is not None:  # a near-tie may round differently on another rank
        for part in outcome:
            plugin.tp_group.broadcast(part, src=0)

    firsts = positions.view(size, nodes)[:, 0] + 1
    plugin.keep(PendingDraws(tracked, drawn, logits, firsts, path, lengths, plugin.origin))
    capture.verified(plugin, verify_input, batch, logits_output, *outcome)
    return outcome
