"""Grammars of the requests that run: which tokens may follow, at the end of a response and at every
draft node.

Owns one matcher per request that is structured and the masks on the logits; not what may be asked
and how its grammar is made (structures.py, json_schema.py), not the draw, no engine's block of
nodes. Masked logits take the place of the model's for everything after: penalties, masks by
probability, the draw, and the log-probs that are reported, which are hence those of the masked
distribution at the request's temperature.

The mask at a node depends on the response and on the drafts on the path to it, so it is the one
that decoding without drafts would apply there: drafts are verified as always and change no token. A
draft that the grammar refuses has probability 0. Where the grammar leaves one text only, its token
is the one that the tokenizer itself takes for it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from paceline.services.rollout_gateway.engines.requests.grammar_judge import GrammarJudge
from paceline.services.rollout_gateway.engines.requests.grammar_tokens import GrammarTokens
from paceline.services.rollout_gateway.engines.requests.json_schema import (
    GrammarFault,
    build_matcher,
)
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.structures import (
    Structure,
    structure_grammar,
    structure_of,
)
from paceline.services.rollout_gateway.engines.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT_GRAMMARS = 16
"""Demands whose grammar is kept as built, those used last: the samples of a group make the same
one.
"""

FAULT_S = 60.0
"""Seconds for which a grammar that could not be built is not tried again: each try may hold the
engine up for BUILD_DEADLINE_S.
"""

Allowed = npt.NDArray[np.uint8]
"""[ceil(V / 8)] tokens that may follow, a bit each, the lowest first."""


@dataclass(slots=True)
class _Followed:
    """Where one response stands in its grammar."""

    matcher: LLMatcher
    confirmed: int  # response tokens of the sequence when it was last looked at
    ahead: list[int]  # what the matcher has taken beyond them
    allowed: Allowed  # after all of it


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """What may follow at the nodes of one row that an allowed path leads to."""

    found: dict[int, Allowed]  # by node, the root among them
    whole: bool  # False: a fault kept drafts from being masked; they are not to be followed

    def lost(self, width: int) -> list[int]:
        """Of so many nodes the drafts that are not to be followed."""
        return [] if self.whole else [node for node in range(1, width) if node not in self.found]


class GrammarMasks:
    """Follows the responses that are structured; the others cost nothing."""

    def __init__(self, config: ModelConfig, model_dir: Path) -> None:
        self._vocab = config.vocab_size
        self._eos = config.eos_token_ids
        self._path = model_dir / "tokenizer.json"
        self._tokens: GrammarTokens | None = None
        self._judge: GrammarJudge | None = None
        self._built: OrderedDict[Structure, LLMatcher] = OrderedDict()
        # until when, what is wrong
        self._faults: dict[Structure, tuple[float, str]] = {}
        self._followed: dict[RunningSequence, _Followed] = {}

    @property
    def possible(self) -> bool:
        """Whether this engine can follow a grammar at all."""
        return bool(self._eos) and self._path.is_file() and find_spec("llguidance") is not None

    def check(self, sampling: Sampling) -> None:
        """Raises InvalidInput naming the field; builds what following it will need."""
        structure = structure_of(sampling)
        if structure is None:
            return
        try:
            self._allowed(self._matcher(structure), structure)
        except GrammarFault as fault:
            raise structure.refused(fault) from fault

    def follow(self, sequence: RunningSequence, ahead: Sequence[int] = ()) -> None:
        """Take what a structured response has said since, and `ahead`, drawn behind it and not in
        it yet.

        Raises GrammarFault when it cannot go on; `error_of` words it.
        """
        followed = self._followed.get(sequence)
        if followed is None:
            structure = structure_of(sequence.request.sampling)
            assert structure is not None
            followed = _Followed(self._matcher(structure), 0, [], np.empty(0, np.uint8))
        now = [*sequence.tokens[followed.confirmed :], *ahead]
        try:
            moved = _move(followed.matcher, followed.ahead, now)
            if moved or not len(followed.allowed):
                begins = None
                if not sequence.tokens and not ahead:
                    begins = structure_of(sequence.request.sampling)
                followed.allowed = self._allowed(followed.matcher, begins)
        except GrammarFault:
            self._followed.pop(sequence, None)
            raise
        followed.confirmed, followed.ahead = len(sequence.tokens), list(ahead)
        self._followed[sequence] = followed

    @staticmethod
    def error_of(sequence: RunningSequence, fault: GrammarFault) -> str:
        """Why a request ends that cannot go on; the reason is what was asked."""
        structure = structure_of(sequence.request.sampling)
        assert structure is not None
        return f"{InvalidInput.reason}: {structure.field} cannot be followed on: {fault}"

    def drop(self, ended: Iterable[RunningSequence]) -> None:
        """Forget sequences that have ended; unknown ones are ignored."""
        for sequence in ended:
            self._followed.pop(sequence, None)

    def close(self) -> None:
        """End what was started to judge grammars."""
        if self._judge is not None:
            self._judge.close()

    def __len__(self) -> int:
        """Sequences that are followed."""
        return len(self._followed)

    # ---- matchers

    def _matcher(self, structure: Structure) -> LLMatcher:
        """A matcher of its own at the beginning. Raises InvalidInput or GrammarFault."""
        built = self._built.get(structure)
        if built is None:
            built = self._built[structure] = self._build(structure)
            if len(self._built) > KEPT_GRAMMARS:
                self._built.popitem(last=False)
        self._built.move_to_end(structure)
        return built.deep_copy()

    def _build(self, structure: Structure) -> LLMatcher:
        if self._tokens is None:
            try:
                self._tokens = GrammarTokens(self._path, self._vocab, self._eos)
            except InvalidInput as error:
                raise structure.refused(error) from error
        grammar = structure_grammar(structure, self._tokens.special(structure.after))
        if fault := self._agreed(structure, grammar):
            raise GrammarFault(fault)
        return build_matcher(self._tokens.guide, grammar)

    def _agreed(self, structure: Structure, grammar: str) -> str:
        """What is wrong with a grammar, empty for nothing. An engine of several ranks has them
        agree: the judgement depends on the time it takes.
        """
        return self._judged(structure, grammar)

    def _judged(self, structure: Structure, grammar: str) -> str:
        until_s, fault = self._faults.get(structure, (0.0, ""))
        if time.monotonic() < until_s:
            return fault
        if self._judge is None:
            self._judge = GrammarJudge(self._path, self._vocab, self._eos)
        try:
            self._judge.judge(grammar)
        except GrammarFault as error:
            if len(self._faults) == KEPT_GRAMMARS:
                del self._faults[next(iter(self._faults))]
            self._faults[structure] = time.monotonic() + FAULT_S, str(error)
            return str(error)
        return ""

    def _allowed(self, matcher: LLMatcher, begins: Structure | None = None) -> Allowed:
        """The tokens that may follow. Raises GrammarFault, also when no token may.

        begins: set at the beginning of a response, where some tokens have another text.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():  # its mask would then allow the end token alone
            raise GrammarFault(matcher.get_error())
        allowed = bits[: -(-self._vocab // 8)].copy()
        if self._vocab % 8:
            allowed[-1] &= (1 << self._vocab % 8) - 1
        if begins is not None and not begins.begins_free:
            assert self._tokens is not None
            allowed &= self._tokens.kept_at_front[: len(allowed)]
        if not allowed.any():
            raise GrammarFault("no token of the vocabulary may follow")
        return allowed

    # ---- draft nodes

    def node_masks(
        self, sequence: RunningSequence, tokens: Sequence[int], parents: Sequence[int]
    ) -> NodeMasks:
        """Masks of the nodes under where `follow` has left a response.

        tokens, parents [Q]: of the row's nodes, parents first, the root its own parent; a token of
        -1 is no node.
        """
        followed = self._followed[sequence]
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            if tokens[node] >= 0:
                children.setdefault(parents[node], []).append(node)
        masks = {0: followed.allowed}
        try:
            self._descend(followed.matcher, tokens, children, 0, masks)
        except GrammarFault:
            # A broken matcher stays so: `follow` takes another, and meets the fault again if the
            # draft is drawn.
            del self._followed[sequence]
            return NodeMasks(masks, whole=False)

        return NodeMasks(masks, whole=True)

    def _descend(
        self,
        matcher: LLMatcher,
        tokens: Sequence[int],
        children: dict[int, list[int]],
        node: int,
        masks: dict[int, Allowed],
    ) -> None:
        """Masks of what hangs under a node at which the matcher stands, and stands again
        afterwards.
        """
        for child in children.get(node, ()):
            token = tokens[child]
            # nothing is drawn after an end
            if not _holds(masks[node], token) or token in self._eos:
                continue
            if not matcher.consume_token(token):
                raise GrammarFault(matcher.get_error())
            masks[child] = self._allowed(matcher)
            self._descend(matcher, tokens, children, child, masks)
            if not matcher.rollback(1):
                raise GrammarFault(matcher.get_error())


def _holds(allowed: Allowed, token: int) -> bool:
    return bool(allowed[token >> 3] >> (token & 7) & 1)


def _move(matcher: LLMatcher, before: Sequence[int], now: Sequence[int]) -> bool:
    """Have a matcher that stands behind `before` stand behind `now` instead; whether that is
    elsewhere. Draws that a request has lost are drawn anew, and may then be others.
    """
    alike = next(
        (index for index, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(now)),
    )
    back, new = len(before) - alike, list(now[alike:])
    if (back and not matcher.rollback(back)) or (new and not matcher.consume_tokens(new)):
        raise GrammarFault(matcher.get_error())
    return bool(back or new)


def forbid_(logits: Tensor, index: Tensor, masks: Sequence[Allowed]) -> None:
    """Set to -inf in the rows `index` int64 [n] of logits [N, V] what none of their masks allows.

    The bits travel to the device, an eighth of a byte a token.
    """
    bits = torch.from_numpy(np.stack(masks)).to(logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (bits[:, :, None] >> places & 1).flatten(1).bool()[:, : logits.shape[-1]]
    beyond = logits.shape[-1] - allowed.shape[-1]
    if beyond > 0:  # a vocabulary that the device has padded
        allowed = torch.nn.functional.pad(allowed, (0, beyond))
    logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)
