"""JSON grammars of the requests that run: which tokens may follow, at the end of a response and at
every draft node.

Owns one matcher per request with a schema and the masks on the logits; not what a schema may be and
how its grammar is built (json_schema.py), not the draw. Masked logits take the place of the
model's for everything after: penalties, masks by probability, the draw, and the log-probs that are
reported, which are hence those of the masked distribution at the request's temperature.

The mask at a node depends on the response and on the drafts on the path to it, so it is the one
that decoding without drafts would apply there: drafts are verified as always and change no token. A
draft that the grammar refuses has probability 0. Where the schema leaves one text only, its token
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

from paceline.models.config import ModelConfig
from rollout_gateway.engines.embedded.nodes import Nodes
from rollout_gateway.engines.nouns import Finish
from rollout_gateway.engines.requests.grammar_judge import GrammarJudge
from rollout_gateway.engines.requests.json_schema import (
    GrammarFault,
    build_matcher,
    check_json_schema,
    grammar_of,
    load_tokenizer,
    refused,
)
from rollout_gateway.engines.requests.sequence import RunningSequence
from rollout_gateway.engines.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 16
"""Schemas whose grammar is kept as built, those used last: the samples of a group ask for the same
one.
"""

FAULT_S = 60.0
"""Seconds for which a schema that could not be built is not tried again: each try may hold the
engine up for BUILD_DEADLINE_S.
"""

Allowed = npt.NDArray[np.bool_]
"""[V] tokens that may follow."""


@dataclass(slots=True)
class _Followed:
    """Where one response stands in its grammar."""

    matcher: LLMatcher
    consumed: int  # response tokens the matcher has taken
    allowed: Allowed  # after them


class Grammars:
    """Follows the responses that have a schema and masks their logits; the others cost nothing."""

    def __init__(self, config: ModelConfig, model_dir: Path) -> None:
        self._vocab = config.vocab_size
        self._eos = config.eos_token_ids
        self._path = model_dir / "tokenizer.json"
        self._tokenizer: LLTokenizer | None = None
        self._judge: GrammarJudge | None = None
        self._built: OrderedDict[str, LLMatcher] = OrderedDict()
        self._faults: dict[str, tuple[float, str]] = {}  # by schema: until when, what is wrong
        self._followed: dict[RunningSequence, _Followed] = {}

    @property
    def possible(self) -> bool:
        """Whether this engine can follow a schema at all."""
        return bool(self._eos) and self._path.is_file() and find_spec("llguidance") is not None

    def check(self, sampling: Sampling) -> None:
        """Raises InvalidInput naming response_format; builds what following it will need."""
        if not sampling.json_schema:
            return
        check_json_schema(sampling.json_schema, ignore_eos=sampling.ignore_eos)
        try:
            self._allowed(self._matcher(sampling.json_schema))
        except GrammarFault as fault:
            raise refused(fault, sampling.json_schema) from fault

    def advance(self, rows: Iterable[RunningSequence]) -> None:
        """Take what responses have said since.

        One that cannot go on has its finish and error set, and it alone.
        """
        for sequence in rows:
            if sequence.request.sampling.json_schema:
                try:
                    self._advance(sequence)
                except GrammarFault as fault:
                    sequence.finish = Finish.ERROR
                    sequence.error = f"response_format cannot be followed on: {fault}"

    def mask_(self, rows: Sequence[RunningSequence], nodes: Nodes, logits: Tensor) -> None:
        """Set what may not follow to -inf in logits [N, V] of the forwarded nodes; rows as given to
        `advance`.

        Nodes that no allowed path leads to stay as they are. Of drafts that a fault keeps from
        being masked the token becomes -1: they are not followed, and the request goes on without
        them.
        """
        asking = [row for row, sequence in enumerate(rows) if sequence.request.sampling.json_schema]
        if not asking:
            return
        index = torch.tensor(asking, device=logits.device)
        tokens = nodes.tokens[index].tolist()
        parents = nodes.every_parent[index].tolist()
        places: list[int] = []
        masks: list[Allowed] = []
        for row, drafts, above in zip(asking, tokens, parents, strict=True):
            found, whole = self._node_masks(rows[row], drafts, above)
            if not whole:
                lost = [node for node in range(1, nodes.width) if node not in found]
                nodes.tokens[row, torch.tensor(lost, dtype=torch.int64, device=logits.device)] = -1
            places += [row * nodes.width + node for node in found]
            masks += found.values()

        _mask_(logits, nodes, places, masks)

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

    def _advance(self, sequence: RunningSequence) -> None:
        followed = self._followed.get(sequence)
        if followed is not None and followed.consumed == len(sequence.tokens):
            return
        if followed is None:
            matcher, consumed = self._matcher(sequence.request.sampling.json_schema), 0
        else:
            matcher, consumed = followed.matcher, followed.consumed
        if not matcher.consume_tokens(sequence.tokens[consumed:]):
            raise GrammarFault(matcher.get_error())
        self._followed[sequence] = _Followed(matcher, len(sequence.tokens), self._allowed(matcher))

    def _matcher(self, schema: str) -> LLMatcher:
        """A matcher of its own at the beginning. Raises InvalidInput or GrammarFault."""
        until_s, fault = self._faults.get(schema, (0.0, ""))
        if time.monotonic() < until_s:
            raise GrammarFault(fault)
        built = self._built.get(schema)
        if built is None:
            try:
                built = self._built[schema] = self._build(schema)
            except GrammarFault as error:
                if len(self._faults) == KEPT_GRAMMARS:
                    del self._faults[next(iter(self._faults))]
                self._faults[schema] = time.monotonic() + FAULT_S, str(error)
                raise
            if len(self._built) > KEPT_GRAMMARS:
                self._built.popitem(last=False)
        self._built.move_to_end(schema)
        return built.deep_copy()

    def _build(self, schema: str) -> LLMatcher:
        grammar = grammar_of(schema, check_json_schema(schema, ignore_eos=False))
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path, self._vocab, self._eos)
        if self._judge is None:
            self._judge = GrammarJudge(self._path, self._vocab, self._eos)
        self._judge.judge(grammar)
        return build_matcher(self._tokenizer, grammar)

    def _allowed(self, matcher: LLMatcher) -> Allowed:
        """What may follow. Raises GrammarFault, also when nothing may."""
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():  # its mask would then allow the end token alone
            raise GrammarFault(matcher.get_error())
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise GrammarFault("no token of the vocabulary may follow")
        return allowed

    # ---- draft nodes

    def _node_masks(
        self, sequence: RunningSequence, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[dict[int, Allowed], bool]:
        """By node what may follow there, where an allowed path leads; and whether the walk met no
        fault.

        tokens, parents [Q]: of the row's nodes, parents first, the root its own parent.
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
            # A broken matcher stays so: `advance` takes another, and meets the fault again if the
            # draft is drawn.
            del self._followed[sequence]
            return masks, False

        return masks, True

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
            if not masks[node][token] or token in self._eos:  # nothing is drawn after an end
                continue
            if not matcher.consume_token(token):
                raise GrammarFault(matcher.get_error())
            masks[child] = self._allowed(matcher)
            self._descend(matcher, tokens, children, child, masks)
            if not matcher.rollback(1):
                raise GrammarFault(matcher.get_error())


def _mask_(logits: Tensor, nodes: Nodes, places: Sequence[int], masks: Sequence[Allowed]) -> None:
    """Mask logits [N, V] at nodes of the flattened block."""
    index = torch.tensor(places, device=logits.device)
    if nodes.kept is not None:
        # kept ascends, and every node with a mask is among them
        index = torch.searchsorted(nodes.kept, index)
    forbidden = torch.from_numpy(~np.stack(masks)).to(logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)
