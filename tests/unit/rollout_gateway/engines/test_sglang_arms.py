"""Arms of SGLang: the arms it can serve, the arm of a round, and the bandit's inputs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from paceline.arm_names import OFF, ROOT, TreeSize
from paceline.errors import ConfigError, InvalidInput
from paceline.services.rollout_gateway.bandits.base import BanditSettings
from paceline.services.rollout_gateway.bandits.kinds import TRIAL_PULLS
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import (
    ArmChooser,
    Tracked,
    first_nodes,
    parse_arms,
    taken_tokens,
)
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

NAMES = ("off", "eagle:3_1_4", "eagle:4_3_12")


def make(names: tuple[str, ...] = NAMES, **settings: object) -> ArmChooser:
    return ArmChooser(names, BanditSettings.model_validate({"epsilon": 0.0, **settings}), seed=1)


def tracked(forced_arm: str = "", drafter: int = 0) -> Tracked:
    request = Request(1, (1, 2, 3), Sampling(seed=1, max_tokens=8), forced_arm=forced_arm)
    return Tracked(RunningSequence(request, frozenset(), token_limit=8, length=3), drafter)


def pulls(chooser: ArmChooser) -> dict[str, int]:
    return {report.arm: report.pulls for report in chooser.bandit.reports()}


def play(chooser: ArmChooser, rounds: int, *rows: Tracked | None, drafter: int = 0) -> list[str]:
    """Rounds of a batch in which every arm gives the same rate; the arms chosen."""
    chosen = []
    for _ in range(rounds):
        plan = chooser.choose(chooser.forced, rows, drafter)
        chooser.observe(plan, [2] * len(rows), 0.1)
        chosen.append(plan.arm.name)
    return chosen


# ---- names and shapes


def test_an_arm_is_speculator_steps_topk_and_nodes() -> None:
    arm = parse_arms(("off", "eagle3:8_4_48"))["eagle3:8_4_48"]
    assert (arm.speculator, arm.shape, arm.drafted) == ("eagle3", TreeSize(8, 4, 48), 47)


def test_off_is_the_root_alone() -> None:
    arm = parse_arms((OFF,))[OFF]
    assert (arm.shape, arm.drafted) == (ROOT, 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "eagle",
        "medusa:3_1_4",
        "eagle:3_1_4_5",
        "eagle:0_1_1",  # no step
        "eagle:3_0_1",  # no child
        "eagle:3_1_5",  # a chain of three drafts has four nodes
        "eagle:2_4_1",  # the root alone is off
        "eagle:1_4_6",  # one level of four and the root are five
        "ngram:4_2_5",  # no width to choose
        "ngram:3_1_5",
    ],
)
def test_what_sglang_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_arms(("off", name))
    assert refused.value.seen == name
    assert refused.value.allowed


@pytest.mark.parametrize(("steps", "topk"), [(1, 1), (4, 1), (1, 4), (2, 3), (4, 2), (5, 4)])
def test_a_shape_holds_as_many_nodes_as_drafting_can_propose(steps: int, topk: int) -> None:
    # every step proposes topk children of each kept node and keeps topk
    proposed, kept = 0, 1
    for _ in range(steps):
        proposed += kept * topk
        kept = topk
    assert TreeSize(steps, topk, 2).capacity == 1 + proposed


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("eagle:3_1_4",),
        ("eagle:3_1_4", "off"),
        ("off", "eagle:3_1_4", "eagle:3_1_4"),
        ("off", "eagle:3_1_4", "ngram:4_1_5"),
        ("off", "eagle:3_1_4", "eagle3:3_1_4"),
    ],
)
def test_arms_that_one_process_cannot_serve_together_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        parse_arms(names)


def test_the_launch_shape_covers_every_arm() -> None:
    chooser = make(("off", "eagle:8_1_9", "eagle:2_4_16"))
    assert chooser.maximum == TreeSize(steps=8, topk=4, draft_tokens=16)
    assert make(("off", "ngram:2_1_3", "ngram:7_1_8")).maximum == TreeSize(7, 1, 8)
    assert make(("off",)).maximum == ROOT


def test_the_launch_shape_of_chains_is_a_chain() -> None:
    maximum = make(("off", "eagle:2_1_3", "eagle:5_1_6")).maximum
    assert maximum.draft_tokens == maximum.steps + 1


# ---- choice


def test_the_engine_wide_arm_goes_before_that_of_requests() -> None:
    chooser = make()
    chooser.force("eagle:3_1_4")
    assert chooser.choose(chooser.forced, [tracked("eagle:4_3_12")]).arm.name == "eagle:3_1_4"
    chooser.force("")
    assert chooser.choose(chooser.forced, [tracked("eagle:4_3_12")]).arm.name == "eagle:4_3_12"


def test_free_requests_go_along_with_the_only_arm_asked_for() -> None:
    rows = [tracked(), None, tracked("eagle:3_1_4"), tracked("eagle:3_1_4")]
    assert make().choose("", rows).arm.name == "eagle:3_1_4"


def test_requests_that_disagree_are_off() -> None:
    assert (
        make().choose("", [tracked("eagle:3_1_4"), tracked("eagle:4_3_12"), tracked()]).arm.name
        == OFF
    )


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(InvalidInput):
        make().force("eagle:9_1_10")


def test_the_bandit_tries_every_arm_and_keeps_the_fastest() -> None:
    chooser, rates, chosen = make(), {"off": 1.0, "eagle:3_1_4": 3.0, "eagle:4_3_12": 2.0}, []
    for _ in range(60):
        plan = chooser.choose("", [None])
        chooser.observe(plan, [4], 4 / rates[plan.arm.name])
        chosen.append(plan.arm.name)
    assert set(chosen) == set(NAMES)
    assert set(chosen[-30:]) == {"eagle:3_1_4"}


# ---- the bandit's inputs


def test_the_first_round_of_an_arm_in_a_group_teaches_nothing() -> None:
    chooser = make(groups=(1, 8))
    plan = chooser.choose("off", [None])
    chooser.observe(plan, [1], 100.0)
    assert pulls(chooser) == {}
    chooser.observe(plan, [1], 0.1)
    chooser.observe(plan, [1] * 8, 100.0)
    assert pulls(chooser) == {"off": 1}


def test_a_round_with_a_request_of_an_older_drafter_teaches_nothing() -> None:
    chooser = make()
    play(chooser, 40, tracked(drafter=1), drafter=1)
    before = pulls(chooser)
    play(chooser, 40, tracked(drafter=1), tracked(drafter=2), drafter=2)
    assert pulls(chooser) == before


def test_a_round_with_a_probe_teaches_nothing() -> None:
    chooser = make()
    play(chooser, 40, tracked(drafter=1), drafter=1)
    before = pulls(chooser)
    probe = tracked(drafter=1)
    probe.sequence.request = replace(probe.request, probe=True, forced_arm="off")
    play(chooser, 40, tracked(drafter=1), probe, drafter=1)
    assert pulls(chooser) == before


def test_the_bandit_keeps_to_the_old_drafters_best_until_only_new_requests_run() -> None:
    chooser = make()
    for _ in range(60):
        plan = chooser.choose("", [tracked(drafter=1)], 1)
        chooser.observe(plan, [4], 1.0 if plan.arm.name == "eagle:4_3_12" else 2.0)
    chooser.renew(Target.DRAFTER)
    assert set(play(chooser, 20, tracked(drafter=1), drafter=2)) == {"eagle:4_3_12"}
    trial = play(chooser, 2 * TRIAL_PULLS, tracked(drafter=2), drafter=2)
    assert set(trial) == {"eagle:3_1_4", "eagle:4_3_12"}


def test_a_new_drafter_inherits_where_its_trainer_knows_the_one_before() -> None:
    chooser = make()
    play(chooser, 60, tracked())
    before = {report.arm: report.mean_tokens_per_s for report in chooser.bandit.reports()}
    shift = AcceptanceShift(0, (0.4, 0.2), (0.6, 0.4))
    chooser.renew(Target.DRAFTER, shift)
    chooser.choose("", [tracked(drafter=1)], 1)
    after = {report.arm: report.mean_tokens_per_s for report in chooser.bandit.reports()}
    assert after["eagle:3_1_4"] == pytest.approx(before["eagle:3_1_4"] * 2.0 / 1.6)


def test_of_two_new_drafters_in_a_row_the_second_inherits_nothing() -> None:
    chooser = make()
    play(chooser, 60, tracked())
    chooser.renew(Target.DRAFTER, AcceptanceShift(0, (0.4,), (0.6,)))
    chooser.renew(Target.DRAFTER, AcceptanceShift(1, (0.6,), (0.7,)))
    chooser.choose("", [tracked(drafter=2)], 2)
    rates = {report.arm: report.mean_tokens_per_s for report in chooser.bandit.reports()}
    assert rates["eagle:3_1_4"] == rates["eagle:4_3_12"] == 0


def test_a_new_drafter_leaves_what_is_known_of_off() -> None:
    chooser = make()
    play(chooser, 60, tracked())
    chooser.renew(Target.DRAFTER)
    chooser.choose("", [tracked(drafter=1)], 1)
    rates = {report.arm: report.mean_tokens_per_s for report in chooser.bandit.reports()}
    assert rates["off"] > 0
    assert rates["eagle:3_1_4"] == rates["eagle:4_3_12"] == 0


def test_a_round_chosen_before_the_drafter_changed_teaches_nothing_after() -> None:
    chooser = make()
    play(chooser, 40, tracked())
    before = pulls(chooser)
    plan = chooser.choose("", [tracked()])
    chooser.renew(Target.DRAFTER)
    chooser.observe(plan, [4], 0.1)
    assert pulls(chooser) == before


# ---- arithmetic of a round


def random_tree(nodes: int, source: random.Random) -> tuple[list[int], np.ndarray]:
    """Parents of a tree numbered level by level, and the mask of ancestors-or-self."""
    parents = sorted(source.randrange(node) for node in range(1, nodes))
    parents = [-1, *(min(parent, node - 1) for node, parent in enumerate(parents, start=1))]
    mask = np.zeros((nodes, nodes), dtype=bool)
    for node in range(nodes):
        at = node
        while at >= 0:
            mask[node, at] = True
            at = parents[at]
    return parents, mask


@pytest.mark.parametrize("kept", [1, 2, 5, 8])
def test_the_first_nodes_of_trees_are_trees_with_the_same_ancestors(kept: int) -> None:
    source, nodes = random.Random(kept), 8
    trees = [random_tree(nodes, source) for _ in range(3)]
    tokens = np.arange(3 * nodes, dtype=np.int64)
    mask = np.concatenate([one.reshape(-1) for _, one in trees])
    cut_tokens, cut_mask = first_nodes(tokens, mask, nodes, kept)
    assert cut_tokens.flags.c_contiguous
    assert cut_mask.flags.c_contiguous
    for row, (parents, _) in enumerate(trees):
        assert cut_tokens.reshape(3, kept)[row].tolist() == [
            row * nodes + node for node in range(kept)
        ]
        for node in range(kept):
            line, at = {node}, node
            while (at := parents[at]) >= 0:
                line.add(at)
            assert set(np.flatnonzero(cut_mask.reshape(3, kept, kept)[row, node])) == line


@pytest.mark.parametrize(
    ("accepted", "output", "finished", "taken"),
    [(3, 10, None, 3), (3, 10, 10, 3), (3, 10, 9, 2), (3, 10, 8, 1), (1, 4, 4, 1), (0, 4, 4, 0)],
)
def test_tokens_past_the_stop_are_not_taken(
    accepted: int, output: int, finished: int | None, taken: int
) -> None:
    assert taken_tokens(accepted, output, finished) == taken
