"""The embedded engine's bench: its parts on cases made by hand, and all sections once on a small
scale.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.demo_runs import demo_folder
from benchmarks.engine import run as bench
from benchmarks.engine.compared import STAGES, flops_per_token
from benchmarks.engine.injected import (
    RANDOM_56M,
    RANDOM_TINY,
    build_injected,
    expected_accept_length,
    write_random_model,
)
from benchmarks.engine.runs import (
    Decoded,
    TimedRun,
    TransformersModel,
    decode,
    even_waves,
    flips,
    take_turns,
    workload,
)
from benchmarks.engine.sections import ARMS, grouped_work, judged
from benchmarks.options import counts
from benchmarks.result import paired_ratio
from paceline.errors import InvalidInput
from paceline.messages import from_message
from paceline.models.config import parse_config
from paceline.models.loading import model_shapes
from paceline.plugins import import_object
from paceline.services.rollout_gateway.bandits.base import BanditSettings
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import RoundSplit
from paceline.speculators.kinds import SPECULATORS
from paceline.speculators.ngram import NgramSpeculator

PROMPTS = [(5, 6, 7, index) for index in range(2, 6)]
STEPS, TOKENS = 7, 200


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    write_random_model(folder, RANDOM_TINY, seed=0)
    return folder


def spec(folder: Path) -> EmbeddedSpec:
    arm = f"ngram:{STEPS}_1_{STEPS + 1}"
    return EmbeddedSpec.model_validate(
        {
            "model_dir": str(folder),
            "drafter": "ngram",
            "max_batch": 4,
            "arms": (arm,),
            "verify_budget": False,
        }
    )


def options(**changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    made = parser.parse_args([])
    vars(made).update(changes)
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)  # two threads on shared cores are slow
async def test_a_quick_run_has_every_section_and_equal_tokens_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_engine_gateways.py covers the sections with whole gateways."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one_engine = ",".join(
        name for name in bench.SECTIONS if name not in ("launch", "capture", "pretrained")
    )
    result = await bench.run(options(quick=True, only=[one_engine]))
    sections = {str(row["section"]).split(",")[0] for row in result.rows}
    assert sections == {
        "memory",
        "policy_trained",
        "beside transformers",
        "policy_start",
        "1.1M random weights",
        "same seeds",
        "rollout of 4 prompts",
        "groups of samples",
        "a promotion every 2 rollouts of 4 samples",
        "1 and 2 threads",
        "ms of a round",
        "arithmetic limit",
    }
    trained = {row["way"] for row in result.rows if row["section"] == "policy_trained, fp32"}
    assert trained == {"off", *ARMS, f"bandit {BanditSettings().kind}"}
    equal = [goal for goal in result.goals if "equal tokens" in goal.name]
    assert len(equal) == 8
    assert all(goal.met and goal.value == 1.0 for goal in equal)
    assert all(goal.met is None for goal in result.goals if goal not in equal), (
        "one pair judges no speed"
    )
    assert all(float(row["tokens/s"] or 0) > 0 for row in result.rows if "tokens/s" in row)
    (limit,) = (row for row in result.rows if row["section"] == "arithmetic limit, fp32")
    assert limit["operations a token"] == 4_505_600, (
        "two for each of the demo policy's weights but embedding and norms"
    )


def test_flips_count_sequences_near_ties_and_what_comes_after_a_difference() -> None:
    reference = [
        Decoded((1, 2, 3, 4)),
        Decoded((1, 2, 3), 1e-6),
        Decoded((1, 2)),
        Decoded((7, 8, 9), 0.5),
    ]
    other = [
        Decoded((1, 2, 3, 4)),
        Decoded((1, 5, 3), 0.1),
        Decoded((1, 2, 3)),
        Decoded((6, 8, 9), 0.5),
    ]
    found = flips(reference, other)
    assert (found.sequences, found.flipped, found.near_ties, found.unexplained) == (4, 3, 1, 2)
    assert (found.tokens, found.behind) == (12, 2 + 0 + 3)
    assert (found + found).behind == 10


async def test_ways_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    def way(name: str) -> TimedRun:
        order.append(name)
        return TimedRun(1.0 + order.count(name), (Decoded((1, 2)),))

    runs = await take_turns({name: lambda name=name: way(name) for name in "ab"}, 3, "test")  # type: ignore[misc]
    assert "".join(order) == "abbaabba"
    assert [one.seconds for one in runs["a"]] == [3.0, 4.0, 5.0]


def test_waves_hold_the_batch_and_keep_the_order() -> None:
    work = workload(PROMPTS, 3, 8)
    assert [[request.request_id for request in wave] for wave in work.waves] == [[0, 1, 2], [3]]
    assert [request.sampling.seed for request in work.requests] == [0, 1, 2, 3]


def test_even_waves_are_of_like_length_and_stand_at_even_quantiles() -> None:
    pool = workload([(7, index) for index in range(12)], 12, 8)
    lengths = [60, 10, 50, 20, 40, 30, 120, 70, 110, 80, 100, 90]
    work = even_waves(pool, lengths, 2, 3)
    assert [[lengths[request.request_id] for request in wave] for wave in work.waves] == [
        [20, 30],
        [60, 70],
        [100, 110],
    ]
    assert all(request.sampling.seed == request.request_id for request in work.requests)
    with pytest.raises(InvalidInput, match="pool"):
        even_waves(pool, lengths, 5, 3)


def test_grouped_work_takes_prompts_of_every_length_and_the_longest() -> None:
    work = workload(PROMPTS, 4, 8)
    run = TimedRun(1.0, tuple(Decoded((1,) * length) for length in (9, 2, 4, 1)))
    grouped = grouped_work(work, run, 2)
    assert [request.prompt for request in grouped.requests] == [PROMPTS[1]] * 2 + [PROMPTS[0]] * 2


def test_fewer_than_three_pairs_judge_nothing() -> None:
    assert judged("x", 1.0, paired_ratio([2.0] * 2, [1.0] * 2)).met is None
    assert judged("x", 1.0, paired_ratio([2.0] * 3, [1.0] * 3)).met is True
    assert judged("x", 3.0, paired_ratio([2.0] * 3, [1.0] * 3)).met is False


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_injected_drafts_are_right_as_often_as_asked(random_model: Path, acceptance: float) -> None:
    engine, known = build_injected(spec(random_model))
    work = workload(PROMPTS, 4, TOKENS, ignore_eos=True)
    plain = decode(engine, work, "off", 1)
    known.know(
        {r.prompt: a.tokens for r, a in zip(work.requests, plain.answers, strict=True)},
        acceptance,
        seed=2,
    )
    drafted = decode(engine, work, spec(random_model).arms[0], 1)
    assert [a.tokens for a in drafted.answers] == [a.tokens for a in plain.answers]
    assert drafted.accept_length is not None
    if acceptance in (0.0, 1.0):
        # A wrong draft costs its whole round; the last round of 200 tokens in rounds of 8 is a full
        # one.
        assert drafted.accept_length == (STEPS + 1 if acceptance else 1)
    else:
        assert drafted.accept_length == pytest.approx(
            expected_accept_length(acceptance, STEPS), rel=0.1
        )


def test_the_expected_acceptance_length_is_that_of_a_geometric_law() -> None:
    a, steps = 0.7, 5
    by_outcome = sum((n + 1) * a**n * (1 - a) for n in range(steps)) + (steps + 1) * a**steps
    assert math.isclose(expected_accept_length(a, steps), by_outcome)


def test_the_table_of_speculators_is_as_before_even_when_the_build_fails(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        build_injected(spec(tmp_path))
    assert import_object(str(SPECULATORS["ngram"].drafter)) is NgramSpeculator


def test_the_random_model_has_56_million_parameters() -> None:
    raw = {**RANDOM_56M, "architectures": ["LlamaForCausalLM"]}
    assert sum(math.prod(shape) for shape in model_shapes(parse_config(raw)).values()) == 55_591_424


def test_operations_are_two_for_each_weight_of_a_matrix_but_the_embedding() -> None:
    config = parse_config({**RANDOM_56M, "architectures": ["LlamaForCausalLM"]})
    matrices = {name: shape for name, shape in model_shapes(config).items() if len(shape) == 2}
    del matrices["model.embed_tokens.weight"]
    assert flops_per_token(config) == 2 * sum(math.prod(shape) for shape in matrices.values())


def test_the_engine_counts_the_stages_of_its_rounds(random_model: Path) -> None:
    engine, _ = build_injected(spec(random_model))
    before = from_message(RoundSplit, engine.load.split)
    run = decode(engine, workload(PROMPTS, 4, 4, ignore_eos=True), "off", 1)
    spent = from_message(RoundSplit, engine.load.split) - before
    assert (spent.rounds, spent.nodes) == (4, 16)
    assert all(getattr(spent, stage) > 0 for stage in STAGES)
    assert sum(getattr(spent, stage) for stage in STAGES) < run.seconds


def test_transformers_is_asked_for_greedy_decoding_only() -> None:
    demo = demo_folder()
    model = TransformersModel(demo / "policy_start")
    with pytest.raises(InvalidInput, match="greedy"):
        model.generate(workload(PROMPTS, 4, 4), 1)


@pytest.mark.parametrize("text", ["0", "1,,2", "a", "-1", ""])
def test_counts_must_be_counts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="e\\.g\\. 1,4,8"):
        counts(text)


def test_counts_come_in_ascending_order_once() -> None:
    assert counts("8,1,8") == (1, 8)


async def test_a_section_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no such section"):
        await bench.run(options(only=["rollouts"]))


def test_sections_run_in_their_own_order() -> None:
    assert bench.chosen_sections("profile,memory") == ["memory", "profile"]
    usual = bench.chosen_sections("")
    assert usual == [name for name in bench.SECTIONS if name != "pretrained"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_quick_run_on_the_pretrained_model_has_equal_tokens_in_every_arm(
    real_model: Path,
) -> None:
    result = await bench.run(options(quick=True, only=["pretrained"]))
    rows = [row for row in result.rows if row["section"] == "chat, float32"]
    ways = ["off", "self:2_1_3", "self:4_1_5", "ngram:4_1_5", "bandit epsilon_greedy"]
    assert [row["way"] for row in rows] == ways
    accepted = float(str(rows[2]["acceptance length"]))
    assert accepted > 3  # of four drafts, and one token more
    assert result.goals[-1].met
