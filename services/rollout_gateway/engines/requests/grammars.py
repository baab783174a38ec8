"""Masks the logits of running requests by their grammars, at the end of a response and at draft
nodes.

Masked logits replace the model's logits in all later steps: penalties, masks by probability, the
draw, and the reported log-probs. The log-probs are therefore of the masked distribution at the
request's temperature.

The mask at a node depends on the response and on the drafts on the path to it. It equals the mask
of decoding without drafts, so verification is unchanged and drafts change no token. A draft that
the grammar rejects has probability 0. Where the grammar leaves only one text, its token is the
tokenizer's own token for it.

This module owns one matcher per structured request. structures.py defines the grammars. Draws
are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from paceline.services.rollout_gateway.engines.requests import grammar_judge, structures
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT_GRAMMARS = 16
"""Number of most recently used grammars kept as built. The samples of a group share a grammar."""

FAULT_S = 60.0
"""Seconds before a grammar that could not be built is tried again. Each try may delay the engine by
BUILD_DEADLINE_S.
"""

Allowed = npt.NDArray[np.uint8]
"""[ceil(V / 8)] bitmask of tokens that may follow, lowest bit first."""


Tree = dict[int, list[int]]
"""Children of each node."""
Masks = dict[int, Allowed]
"""Allowed tokens at each node."""


@dataclass(slots=True)
class _Followed:
    """Progress of one response in its grammar."""

    matcher: LLMatcher
    confirmed: int  # response tokens of the sequence at the last call
    ahead: list[int]  # tokens that the matcher has taken beyond `confirmed`
    allowed: Allowed  # after all tokens taken


class GrammarMasks:
    """Follows structured responses; other responses cost nothing."""

    def __init__(self, config: ModelConfig, model_dir: Path) -> None:
        self._vocab = config.vocab_size
        self._eos = config.eos_token_ids
        self._path = model_dir / "tokenizer.json"
        self._tokens: grammar_judge.GrammarTokens | None = None
        self._judge: grammar_judge.GrammarJudge | None = None
        self._built = lru_cache(KEPT_GRAMMARS)(self._build)
        # end of the block, error message
        self._faults: dict[structures.Structure, tuple[float, str]] = {}
        self._followed: dict[RunningSequence, _Followed] = {}

    @property
    def possible(self) -> bool:
        """Whether this engine can follow grammars."""
        return bool(self._eos) and self._path.is_file() and find_spec("llguidance") is not None

    def check(self, sampling: Sampling) -> None:
        """Builds the grammar of a request in advance. Raises InvalidInput naming the field."""
        structure = structures.structure_of(sampling)
        if structure is None:
            return
        try:
            self._begin(structure)
        except structures.GrammarFault as fault:
            raise structure.refused(fault) from fault

    def follow(self, sequence: RunningSequence, ahead: Sequence[int] = ()) -> bool:
        """Take the new tokens of a structured response, and `ahead`: drawn tokens that it does not
        hold yet.

        Returns False and sets the sequence's error when the response cannot continue.
        """
        followed = self._followed.pop(sequence, None)
        try:
            followed = followed or self._begin(_demand_of(sequence))
            now = [*sequence.tokens[followed.confirmed :], *ahead]
            if _move(followed.matcher, followed.ahead, now):
                followed.allowed = self._allowed(followed.matcher)
        except structures.GrammarFault as fault:
            # The demand is at fault, so the reason is InvalidInput's.
            sequence.error = f"{InvalidInput.reason}: {_demand_of(sequence).refused(fault).message}"
            return False
        followed.confirmed, followed.ahead = len(sequence.tokens), list(ahead)
        self._followed[sequence] = followed
        return True

    def drop(self, ended: Iterable[RunningSequence]) -> None:
        """Forget sequences that have ended; unknown sequences are ignored."""
        for sequence in ended:
            self._followed.pop(sequence, None)

    def close(self) -> None:
        """End the process that judges grammars."""
        if self._judge is not None:
            self._judge.close()

    def __len__(self) -> int:
        """Number of sequences with a matcher."""
        return len(self._followed)

    # ---- matchers

    def _begin(self, structure: structures.Structure) -> _Followed:
        """A response at its beginning. Raises InvalidInput or GrammarFault."""
        matcher = self._built(structure).deep_copy()
        assert self._tokens is not None
        kept = None if structure.begins_free else self._tokens.kept_at_front
        return _Followed(matcher, 0, [], self._allowed(matcher, kept))

    def _build(self, structure: structures.Structure) -> LLMatcher:
        if self._tokens is None:
            try:
                self._tokens = grammar_judge.GrammarTokens(self._path, self._vocab, self._eos)
            except InvalidInput as error:
                raise structure.refused(error) from error
        grammar = structures.structure_grammar(structure, self._tokens.special.get(structure.after))
        if fault := self._judged(structure, grammar):
            raise structures.GrammarFault(fault)
        return structures.build_matcher(self._tokens.guide, grammar)

    def _judged(self, structure: structures.Structure, grammar: str) -> str:
        """The fault of a grammar, empty for none.

        An engine of several ranks makes its ranks agree, because the verdict depends on build time.
        """
        until_s, fault = self._faults.get(structure, (0.0, ""))
        if time.monotonic() < until_s:
            return fault
        if self._judge is None:
            self._judge = grammar_judge.GrammarJudge(self._path, self._vocab, self._eos)
        try:
            self._judge.judge(grammar)
        except structures.GrammarFault as error:
            if len(self._faults) == KEPT_GRAMMARS:
                del self._faults[next(iter(self._faults))]
            self._faults[structure] = time.monotonic() + FAULT_S, str(error)
            return str(error)
        return ""

    def _allowed(self, matcher: LLMatcher, kept: Allowed | None = None) -> Allowed:
        """The tokens that may follow. Raises GrammarFault, also when no token may follow.

        kept: tokens with the same text at this place; None: all tokens.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():  # in this state its mask would allow the end token alone
            raise structures.GrammarFault(matcher.get_error())
        allowed = bits[: -(-self._vocab // 8)].copy()
        if self._vocab % 8:
            allowed[-1] &= (1 << self._vocab % 8) - 1
        if kept is not None:
            allowed &= kept[: len(allowed)]
        if not allowed.any():
            raise structures.GrammarFault("no token of the vocabulary may follow")
        return allowed

    # ---- draft nodes

    def mask_(
        self,
        rows: Mapping[int, RunningSequence],
        tokens: Tensor,
        parents: Tensor,
        logits: Tensor,
        kept: Tensor | None = None,
    ) -> None:
        """Set the logits of forbidden tokens to -inf at the nodes of structured rows, in place.

        rows: the sequences of these rows, where `follow` left them. tokens, parents int64 [B, Q]:
        all rows' nodes, parents first; an absent draft has a token or a parent below 0. logits
        [N, V]: of the nodes `kept` int64 [N], ascending, in the flattened block; None: of all
        nodes. Nodes without an allowed path to them stay unchanged. If a fault prevents the masks
        of some drafts, the tokens of these drafts become -1. They are not followed, and the request
        continues without them.
        """
        if not rows:
            return
        index = torch.tensor(list(rows), device=tokens.device)
        places: list[int] = []
        masks: list[Allowed] = []
        for (row, sequence), drafts, above in zip(
            rows.items(), tokens[index].tolist(), parents[index].tolist(), strict=True
        ):
            children: Tree = {}
            for node in range(1, len(drafts)):
                if drafts[node] >= 0 and above[node] >= 0:
                    children.setdefault(above[node], []).append(node)
            found = {0: self._followed[sequence].allowed}
            try:
                self._descend(self._followed[sequence].matcher, drafts, children, 0, found)
            except structures.GrammarFault:
                # A broken matcher cannot be repaired. `follow` makes another matcher, and fails
                # again if the draft is drawn.
                del self._followed[sequence]
                lost = [node for node in range(1, len(drafts)) if node not in found]
                tokens[row, torch.tensor(lost, dtype=torch.int64, device=tokens.device)] = -1
            places += [row * tokens.shape[1] + node for node in found]
            masks += found.values()

        place = torch.tensor(places, device=logits.device)
        forbid_(logits, place if kept is None else torch.searchsorted(kept, place), masks)

    def _descend(
        self, matcher: LLMatcher, tokens: Sequence[int], children: Tree, node: int, masks: Masks
    ) -> None:
        """Add the masks below a node. The matcher is at this node before and after the call."""
        for child in children.get(node, ()):
            token = tokens[child]
            # nothing is drawn after an end
            if not _holds(masks[node], token) or token in self._eos:
                continue
            if not matcher.consume_token(token):
                raise structures.GrammarFault(matcher.get_error())
            masks[child] = self._allowed(matcher)
            self._descend(matcher, tokens, children, child, masks)
            if not matcher.rollback(1):
                raise structures.GrammarFault(matcher.get_error())


def _demand_of(sequence: RunningSequence) -> structures.Structure:
    structure = structures.structure_of(sequence.request.sampling)
    assert structure is not None
    return structure


def _holds(allowed: Allowed, token: int) -> bool:
    return bool(allowed[token >> 3] >> (token & 7) & 1)


def _move(matcher: LLMatcher, before: Sequence[int], now: Sequence[int]) -> bool:
    """Move a matcher from the tokens `before` to the tokens `now`; returns whether it moved.

    Draws that a request has lost are drawn again, and may then differ.
    """
    parted = (at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b)
    alike = next(parted, min(len(before), len(now)))
    back, new = len(before) - alike, list(now[alike:])
    if (back and not matcher.rollback(back)) or (new and not matcher.consume_tokens(new)):
        raise structures.GrammarFault(matcher.get_error())
    return bool(back or new)


def forbid_(logits: Tensor, index: Tensor, masks: Sequence[Allowed]) -> None:
    """Set disallowed tokens to -inf in the rows `index` int64 [n] of logits [N, V], in place.

    masks: one for each row of `index`. They are copied to the device as bits, an eighth of a byte a
    token.
    """
    bits = torch.from_numpy(np.stack(masks)).to(logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (bits[:, :, None] >> places & 1).flatten(1).bool()[:, : logits.shape[-1]]
    beyond = logits.shape[-1] - allowed.shape[-1]
    if beyond > 0:  # a vocabulary that the device has padded
        allowed = torch.nn.functional.pad(allowed, (0, beyond))
    logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)
