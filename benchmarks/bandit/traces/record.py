"""Records how far each drafter would have been right at every token of the demo's responses. Owns
no file.

The embedded engine decodes without speculation; before each round every speculator drafts at its
longest, for all rows. What it proposed is compared with the response afterwards, so that a round of
any chain arm can be replayed from any token. The trained policy and drafter are those of
examples/demo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.bandit.traces import Step
from benchmarks.sglang import demo_folder
from paceline.models.sampling import DrawParams
from paceline.speculators.base import DraftBatch, DraftShape
from rollout_gateway.chat.text import TextCodec
from rollout_gateway.engines.embedded.build import build_embedded
from rollout_gateway.engines.embedded.engine import EmbeddedEngine
from rollout_gateway.engines.embedded.nodes import Nodes
from rollout_gateway.engines.embedded.spec import EmbeddedSpec
from rollout_gateway.engines.embedded.speculative import DraftPart
from rollout_gateway.engines.nouns import Request
from rollout_gateway.engines.sampling import Sampling

STEPS = {"eagle": 7, "ngram": 4}
"""Drafts recorded from every token."""
RIGHT_AT_MOST = 9


class Listener:
    """Takes the place of an engine's drafting: asks all speculators, proposes nothing."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.proposals: dict[
            tuple[str, int, int], list[int]
        ] = {}  # speculator, request, response token -> drafts

    def draft(
        self, parts: Sequence[DraftPart], last: Tensor, params: DrawParams
    ) -> tuple[Nodes, list[DraftPart]]:
        """The roots alone."""
        engine = self._engine
        slots = engine._scheduler.ready()
        running = [engine._scheduler.running[slot] for slot in slots]
        store = engine._store
        batch = DraftBatch(slots, [one.length for one in running], store.token_ids, store.hidden)
        for name, speculator in engine._speculation.drafters.live.items():
            speculator.catch_up(batch)
            proposed = speculator.propose(batch, DraftShape(STEPS[name])).tokens.tolist()
            for one, drafts in zip(running, proposed, strict=True):
                self.proposals[name, one.request.request_id, len(one.tokens)] = drafts
        return Nodes(last), []


def record_step(questions: Sequence[str], samples: int, limit: int, seed: int) -> Step:
    """One rollout: `samples` responses to each question at temperature 1."""
    demo = demo_folder()
    arms = ("off", "eagle:7_1_8", "ngram:4_1_5")
    settings = {
        "model_dir": str(demo / "policy_trained"),
        "drafter": str(demo / "drafter_trained"),
        "arms": arms,
    }
    engine = build_embedded(EmbeddedSpec.model_validate(settings))
    assert isinstance(engine, EmbeddedEngine)
    listener = Listener(engine)
    engine._speculation.draft = listener.draft  # type: ignore[method-assign]
    engine.force_arm("off")
    codec = TextCodec(demo / "policy_trained")
    prompts = [codec.encode(question) for question in questions for _ in range(samples)]
    for number, prompt in enumerate(prompts):
        engine.enqueue(
            Request(number, prompt, Sampling(seed=seed * 1000 + number, max_tokens=limit))
        )
    said: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        said |= {chunk.request_id: chunk.token_ids for chunk in engine.step()}
    runs = {
        name: tuple(
            "".join(
                str(right(listener.proposals[name, number, start], said[number][start:]))
                for start in range(len(said[number]))
            )
            for number in range(len(prompts))
        )
        for name in STEPS
    }
    return Step(lengths=tuple(len(said[number]) for number in range(len(prompts))), runs=runs)


def right(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Drafts from the first on that are the response's tokens."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return min(count, RIGHT_AT_MOST)
