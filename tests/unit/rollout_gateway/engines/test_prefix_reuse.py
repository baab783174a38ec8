"""The embedded engine generates the same output and captures the same rows with and without prefix
reuse.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from random_models import save_random
from torch import Tensor

from paceline.models import decoder
from paceline.models.cache import StaticCache
from paceline.models.config import read_config
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded import prefill
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, PauseMode, Request
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.speculators.eagle import EagleNet
from paceline.trajectory import NEAR_TIE_GAP, Target, VersionSet

ARMS = ("off", "eagle:3_1_4", "ngram:4_1_5")
PROMPT = tuple(random.Random(1).choices(range(3, 97), k=40))
QUESTION = (11, 12, 13, 14, 15)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_random(directory / "old", "llama", sharpness=6.0)
    save_random(directory / "new", "llama", seed=1, sharpness=6.0)
    return directory


def build(directory: Path, sink: RowRing | None = None, **options: object) -> Engine:
    settings = {
        "model_dir": str(directory),
        "drafter": "eagle",
        "max_batch": 4,
        "max_sequence_tokens": 200,
    }
    settings |= {"prefix_tokens": 16, **options}
    return EmbeddedEngine(EmbeddedSpec.model_validate(settings), sink)


def ask(number: int, prompt: Sequence[int], **options: object) -> Request:
    sampling = {"seed": 10 + number, "max_tokens": 25, "ignore_eos": True, **options}
    return Request(number, tuple(prompt), Sampling(**sampling), capture=True)  # type: ignore[arg-type]


def plain(one: Request) -> Request:
    return Request(one.request_id, one.prompt, one.sampling)


def drain(engine: Engine) -> dict[int, Chunk]:
    chunks: dict[int, Chunk] = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        chunks |= {chunk.request_id: chunk for chunk in engine.step()}
    return chunks


def say(engine: Engine, *batch: Request) -> list[Chunk]:
    for one in batch:
        engine.enqueue(one)
    chunks = drain(engine)
    return [chunks[one.request_id] for one in batch]


def alone(directory: Path, one: Request) -> tuple[int, ...]:
    """Tokens of an engine that reuses nothing and drafts nothing."""
    (chunk,) = say(build(directory, drafter="off", prefix_slots=0), plain(one))
    assert chunk.smallest_gap > NEAR_TIE_GAP, "choose other seeds: a near-tie may flip"
    assert chunk.cached_prompt_tokens == 0
    return chunk.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("arm", ARMS)
def test_a_second_turn_computes_only_what_is_new_and_says_what_a_fresh_engine_says(
    arm: str, temperature: float, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(models / "old")
    engine.force_arm(arm)
    (first,) = say(engine, plain(ask(1, PROMPT, temperature=temperature)))
    known = (*PROMPT, *first.token_ids)
    computed: list[int] = []

    def counted(
        weights: decoder.DecoderWeights,
        cache: StaticCache,
        token_ids: Tensor,
        block: decoder.Block,
        inner: tuple[int, ...],
        *,
        cache_only: bool,
    ) -> Tensor:
        computed.append(token_ids.numel())
        return decoder.forward_hidden(
            weights, cache, token_ids, block, inner, cache_only=cache_only
        )

    monkeypatch.setattr(prefill, "forward_hidden", counted)
    second = ask(2, (*known, *QUESTION), temperature=temperature)
    (chunk,) = say(engine, plain(second))
    assert chunk.cached_prompt_tokens == len(known) - 1
    assert computed == [
        len(QUESTION)
    ]  # the last of the first turn and all but the last of the second
    assert chunk.token_ids == alone(models / "old", second)
    stats = engine.load.prefixes
    assert stats.prompt_tokens == len(PROMPT) + len(known) + len(QUESTION)
    assert (stats.reused_tokens, stats.lookups) == (len(known) - 1, 2)


@pytest.mark.parametrize("drafter", ["eagle", "off"])  # with and without kept states
def test_prompts_forwarded_in_columns_say_what_they_say_whole(
    drafter: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [plain(ask(1, PROMPT)), plain(ask(2, PROMPT[5:27]))]
    whole = [alone(models / "old", one) for one in asked]
    monkeypatch.setattr(prefill, "COLUMNS", 12)
    chunks = say(build(models / "old", drafter=drafter), *asked)
    assert [chunk.token_ids for chunk in chunks] == whole


@pytest.mark.slow
def test_crowded_conversations_say_what_they_say_without_reuse(models: Path) -> None:
    """Turns of many conversations on few slots: copies, moves, evictions and siblings all
    happen.
    """
    rng = random.Random(3)
    stems = [[rng.randrange(3, 97) for _ in range(60)] for _ in range(4)]
    batch = [
        ask(
            n,
            (*rng.choice(stems)[: rng.randrange(10, 60)], *QUESTION[: rng.randrange(1, 5)]),
            temperature=n % 2,
        )
        for n in range(40)
    ]
    reference = build(models / "old", drafter="off", prefix_slots=0)
    expected = say(reference, *map(plain, batch))
    assert min(chunk.smallest_gap for chunk in expected) > NEAR_TIE_GAP
    crowds: list[dict[str, object]] = [
        {"prefix_slots": 2},
        {"prefix_slots": 8, "prefill_tokens": 24},
        {"max_batch": 1},
    ]
    for options in crowds:
        engine = build(models / "old", None, bandit={"epsilon": 1.0}, **options)
        chunks = say(engine, *map(plain, batch))
        assert [chunk.token_ids for chunk in chunks] == [chunk.token_ids for chunk in expected]
        reused = sum(chunk.cached_prompt_tokens for chunk in chunks)
        assert engine.load.prefixes.reused_tokens == reused > 0
        assert all(
            chunk.cached_prompt_tokens < len(one.prompt)
            for chunk, one in zip(chunks, batch, strict=True)
        )


class Rows:
    """A sink: (request, position) -> (token, version, state)."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], tuple[int, int, npt.NDArray[np.float32]]] = {}

    def write(
        self,
        request_ids: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.uint32],
        policy_version: int,
        hidden: npt.NDArray[np.uint8],
        parents: npt.NDArray[np.uint32] | None = None,
    ) -> int:
        keys = zip(request_ids.tolist(), positions.tolist(), strict=True)
        for key, token, row in zip(keys, token_ids.tolist(), hidden, strict=True):
            assert key not in self.rows, "a row left twice"
            self.rows[key] = (token, policy_version, row.copy().view(np.float32))
        return len(request_ids)


def serve_as_version_3(engine: Engine, path: Path) -> None:
    """The same weights under another number."""
    engine.prepare_weights(Target.POLICY, 3, path)
    engine.commit_weights(VersionSet(1, 3, 0), PauseMode.IN_PLACE)


@pytest.mark.parametrize("drafter", ["off", "eagle"])
def test_a_second_turn_captures_all_its_rows_as_a_fresh_engine_does(
    drafter: str, models: Path
) -> None:
    options = {"drafter": drafter, "features_dtype": "float32"}
    rows, expected = Rows(), Rows()
    engine = build(models / "old", rows, **options)
    serve_as_version_3(engine, models / "old")
    (first,) = say(engine, plain(ask(1, PROMPT)))  # not captured itself
    turns = [ask(n, (*PROMPT, *first.token_ids, *QUESTION)) for n in (2, 3)]
    chunks = say(engine, *turns)
    assert min(chunk.cached_prompt_tokens for chunk in chunks) >= len(PROMPT)
    fresh = build(models / "old", expected, prefix_slots=0, **options)
    serve_as_version_3(fresh, models / "old")
    assert [chunk.token_ids for chunk in say(fresh, *turns)] == [
        chunk.token_ids for chunk in chunks
    ]
    length = len(turns[0].prompt) + 25
    assert set(rows.rows) == {(one.request_id, at) for one in turns for at in range(length - 1)}
    for key, (token, version, state) in rows.rows.items():
        assert (token, version) == expected.rows[key][:2]
        assert version == 3
        # fp32 sums round by the shape of the block: fresh engines with other prefill_tokens differ
        # by 2e-6 as well.
        np.testing.assert_allclose(state, expected.rows[key][2], rtol=0, atol=5e-6)


def second_turn_reuses(engine: Engine, number: int, prompt: Sequence[int]) -> int:
    (chunk,) = say(engine, plain(ask(number, prompt)))
    return chunk.cached_prompt_tokens


@pytest.mark.parametrize("version", [0, 1])
def test_a_new_policy_forgets_every_prefix(version: int, models: Path) -> None:
    """Whatever number it has: weights served again under the same number may differ."""
    engine = build(models / "old")
    (first,) = say(engine, plain(ask(1, PROMPT)))
    engine.prepare_weights(Target.POLICY, version, models / "new")
    engine.commit_weights(VersionSet(1, version, 0), PauseMode.IN_PLACE)
    second = ask(2, (*PROMPT, *first.token_ids, *QUESTION))
    (chunk,) = say(engine, plain(second))
    assert chunk.cached_prompt_tokens == 0
    assert chunk.token_ids == alone(models / "new", second)


@pytest.mark.parametrize(("mode", "kept"), [(PauseMode.IN_PLACE, False), (PauseMode.RETRACT, True)])
def test_a_request_that_lived_through_an_update_is_reused_only_if_it_was_cached_anew(
    mode: PauseMode, kept: bool, models: Path
) -> None:
    engine = build(models / "old")
    engine.prepare_weights(Target.POLICY, 1, models / "new")
    engine.enqueue(plain(ask(1, PROMPT)))
    engine.step()
    engine.step()
    engine.commit_weights(VersionSet(1, 1, 0), mode)
    engine.step()
    sibling = ask(2, PROMPT)
    engine.enqueue(plain(sibling))
    chunks = drain(engine)
    assert chunks[2].cached_prompt_tokens == (len(PROMPT) - 1 if kept else 0)
    assert chunks[2].token_ids == alone(models / "new", sibling)
    second = ask(3, (*PROMPT, *chunks[1].token_ids, *QUESTION))
    (chunk,) = say(engine, plain(second))
    # The sibling, cached under the new policy from the start, serves the prompt either way.
    assert chunk.cached_prompt_tokens == (
        len(second.prompt) - len(QUESTION) - 1 if kept else len(PROMPT)
    )
    assert chunk.token_ids == alone(models / "new", second)


def test_rows_share_a_prefill_only_if_both_are_cached_alike_under_the_serving_policy() -> None:
    rows = [
        RunningSequence(
            ask(n, PROMPT), frozenset(), 8, length=len(PROMPT), cached=cached, stale=stale
        )
        for n, (cached, stale) in enumerate(
            [(20, True), (20, False), (20, False), (0, False), (20, True)]
        )
    ]
    assert prefill.leaders_of(rows, [19] * 5) == [0, 1, 1, 3, 4]


def test_a_prompt_half_cached_under_an_earlier_policy_serves_nobody(models: Path) -> None:
    engine = build(models / "old", prefill_tokens=20)
    engine.prepare_weights(Target.POLICY, 1, models / "new")
    engine.enqueue(plain(ask(1, PROMPT)))
    engine.step()  # half of the prompt
    engine.commit_weights(VersionSet(1, 1, 0), PauseMode.IN_PLACE)
    sibling = ask(2, PROMPT)
    engine.enqueue(plain(sibling))
    chunks = drain(engine)
    assert chunks[2].cached_prompt_tokens == 0
    assert chunks[2].token_ids == alone(models / "new", sibling)


def test_a_retracted_request_is_no_source_until_it_is_cached_again(models: Path) -> None:
    engine = build(models / "old")
    engine.enqueue(plain(ask(1, PROMPT)))
    engine.step()
    engine.enqueue(plain(ask(2, PROMPT)))
    engine.step()  # request 2 has copied the prefix of request 1
    engine.pause(PauseMode.RETRACT)
    engine.resume()
    one = ask(3, PROMPT)
    engine.enqueue(plain(one))
    chunks = drain(engine)
    assert chunks[3].cached_prompt_tokens == 0
    for number in (1, 2, 3):
        assert chunks[number].token_ids == alone(models / "old", ask(number, PROMPT))


def test_a_request_that_changed_its_slot_serves_others_from_there(models: Path) -> None:
    engine = build(models / "old", drafter="off", max_batch=4)
    other = PROMPT[::-1]
    engine.enqueue(plain(ask(0, (5, 6, 7), max_tokens=3)))
    engine.enqueue(plain(ask(1, PROMPT, max_tokens=60)))
    engine.step()
    engine.enqueue(plain(ask(2, (8, 9), max_tokens=1)))  # a prompt is looked up: 1 is offered
    ended = [chunk.request_id for _ in range(2) for chunk in engine.step()]
    assert ended == [2, 0]  # 1 has moved from slot 1 to slot 0
    engine.enqueue(plain(ask(3, other)))  # into slot 1
    engine.step()
    batch = [ask(4, PROMPT), ask(5, other)]
    chunks = say(engine, *map(plain, batch))
    assert [chunk.cached_prompt_tokens for chunk in chunks] == [len(PROMPT) - 1] * 2
    assert [chunk.token_ids for chunk in chunks] == [alone(models / "old", one) for one in batch]


def test_a_new_drafter_keeps_prefixes(models: Path, tmp_path: Path) -> None:
    EagleNet(read_config(models / "old"), seed=1).save(tmp_path)
    engine = build(models / "old")
    engine.force_arm("eagle:3_1_4")
    (first,) = say(engine, plain(ask(1, PROMPT)))
    engine.prepare_weights(Target.DRAFTER, 1, tmp_path)
    engine.commit_weights(VersionSet(1, 0, 1), PauseMode.IN_PLACE)
    second = ask(2, (*PROMPT, *first.token_ids, 5))
    (chunk,) = say(engine, plain(second))
    assert chunk.cached_prompt_tokens == len(second.prompt) - 2
    assert chunk.token_ids == alone(models / "old", second)


def test_siblings_that_come_one_after_another_reuse_a_request_that_runs_or_has_ended(
    models: Path,
) -> None:
    waiting_turn = build(models / "old", max_batch=1)
    chunks = say(waiting_turn, *(plain(ask(n, PROMPT)) for n in range(3)))
    assert [chunk.cached_prompt_tokens for chunk in chunks] == [0, len(PROMPT) - 1, len(PROMPT) - 1]
    late = build(models / "old")
    late.enqueue(plain(ask(0, PROMPT)))
    late.step()
    late.enqueue(plain(ask(1, PROMPT)))
    both = drain(late)
    assert both[1].cached_prompt_tokens == len(PROMPT) - 1
    assert [both[n].token_ids for n in range(2)] == [chunk.token_ids for chunk in chunks[:2]]


def test_siblings_beyond_one_prefill_copy_what_the_first_of_them_computed(models: Path) -> None:
    engine = build(models / "old", prefill_tokens=80)  # two prompts of 40
    chunks = say(engine, *(plain(ask(n, PROMPT)) for n in range(4)))
    assert [chunk.cached_prompt_tokens for chunk in chunks] == [0, *[len(PROMPT) - 1] * 3]


def test_siblings_of_a_second_turn_compute_its_new_tokens_once(models: Path) -> None:
    engine = build(models / "old")
    (first,) = say(engine, plain(ask(1, PROMPT)))
    turns = [ask(n, (*PROMPT, *first.token_ids, *QUESTION)) for n in (2, 3)]
    chunks = say(engine, *map(plain, turns))
    whole = len(turns[0].prompt) - 1
    assert [chunk.cached_prompt_tokens for chunk in chunks] == [whole - len(QUESTION), whole]
    assert [chunk.token_ids for chunk in chunks] == [alone(models / "old", one) for one in turns]


def test_an_aborted_request_leaves_what_it_has(models: Path) -> None:
    engine = build(models / "old")
    engine.enqueue(plain(ask(1, PROMPT)))
    engine.step()
    engine.abort(frozenset({1}))
    assert second_turn_reuses(engine, 2, PROMPT) == len(PROMPT) - 1


def test_the_least_recently_used_conversation_is_forgotten_first(models: Path) -> None:
    engine = build(models / "old", prefix_slots=1)
    for number, prompt in enumerate((PROMPT, PROMPT[::-1])):
        say(engine, plain(ask(number, prompt)))
    assert second_turn_reuses(engine, 2, (*PROMPT, 5)) == 0


@pytest.mark.parametrize("way", ["flush", "off"])
def test_nothing_is_reused_after_a_flush_or_without_slots(way: str, models: Path) -> None:
    engine = build(models / "old", prefix_slots=0 if way == "off" else 32)
    say(engine, plain(ask(1, PROMPT)))
    engine.flush_cache()
    assert second_turn_reuses(engine, 2, (*PROMPT, 5)) == 0


def test_a_beginning_too_short_is_computed_again(models: Path) -> None:
    engine = build(models / "old")
    say(engine, plain(ask(1, PROMPT)))
    assert second_turn_reuses(engine, 2, (*PROMPT[:15], 5, 6, 7)) == 0
    assert second_turn_reuses(engine, 3, (*PROMPT[:16], 5, 6, 7)) == 16
