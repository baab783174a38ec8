"""Compares ways to decode with the demo's policies: arms and bandits, drafters of little use, and
rollouts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import add
from pathlib import Path

from benchmarks.engine.runs import (
    TimedRun,
    Way,
    Workload,
    decode,
    even_waves,
    flips,
    held_out_prompts,
    median_rate,
    rate_ratio,
    take_turns,
    workload,
)
from benchmarks.result import Goal, Ratio, Row, ratio_goal
from paceline.services.rollout_gateway.bandits.base import BanditSettings
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec

OFF = "off"
ARMS = ("eagle:3_1_4", "eagle:5_1_6", "eagle:7_1_8", "eagle:4_2_8", "ngram:4_1_5")
"""Fixed arms to compare; bandits choose from these arms and off."""

WAVES = {1: 8, 4: 3, 8: 2, 16: 2}
"""Waves of a run by batch size; other sizes take one."""
POOL, QUICK_POOL = 256, 8
"""Held-out prompts from which waves are taken."""

SPEEDUP_GOALS = {1: 2.2, 4: 2.3, 8: 2.2}
PROTOTYPE_RATES = {1: 379.0, 4: 1060.0, 8: 1534.0}
"""Tokens/s without drafts that a prototype reached with this model, one thread, fp32."""
NEVER_BELOW, BEST_ARM_GOAL, ROLLOUT_GOAL = 0.97, 0.95, 1.8
ROLLOUT = 64
GROUP_PAIRS = (("policy_start", "eagle"), ("policy_start", ""), ("policy_trained", ""))
"""Policies of the demo and their drafters; "" is the trained drafter."""
FEWEST_PAIRS = 3
"""A goal is judged from this number of pairs on."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of the measurement."""

    demo: Path
    threads: int = 1
    pairs: int = 9
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    bandits: tuple[str, ...] = (BanditSettings().kind,)  # the first bandit's goals are judged
    max_tokens: int = 200
    quick: bool = False

    @property
    def few(self) -> int:
        """Number of pairs for rows without a goal."""
        return min(self.pairs, max(FEWEST_PAIRS, self.pairs // 3))

    def batches_of(self, wanted: Sequence[int]) -> list[int]:
        """The wanted sizes that are measured; all measured sizes if there are none."""
        return [batch for batch in wanted if batch in self.batches] or list(self.batches)

    def work(
        self,
        batch: int,
        *,
        policy: str = "policy_trained",
        greedy: bool = False,
        waves: int | None = None,
    ) -> Workload:
        """Even waves for a policy of the demo (runs.even_waves); `waves` None takes the number from
        WAVES.
        """
        count, waves = (QUICK_POOL, 1) if self.quick else (POOL, waves or WAVES.get(batch, 1))
        pool, lengths = measured_pool(self.demo, policy, count, self.max_tokens, greedy)
        return even_waves(pool, lengths, batch, waves)

    def at_once(self, count: int) -> Workload:
        """The first held-out prompts in one wave, with responses of any length."""
        return workload(held_out_prompts(self.demo, count), count, self.max_tokens)

    def spec(self, policy: str, **changes: object) -> EmbeddedSpec:
        """Engine settings for a policy of the demo, or a directory: the trained drafter, fp32, all
        ARMS.
        """
        settings: dict[str, object] = {
            "model_dir": str(self.demo / policy),
            "drafter": str(self.demo / "drafter_trained"),
            "threads": self.threads,
            "max_batch": max(self.batches),
            "max_sequence_tokens": 256,
            "arms": ARMS,
        }
        return EmbeddedSpec.model_validate(settings | changes)

    def engine(self, policy: str, **changes: object) -> Engine:
        """Builds an engine. Raises the errors of EmbeddedEngine."""
        return EmbeddedEngine(self.spec(policy, **changes))

    def bandit_engines(self, policy: str, **changes: object) -> dict[str, Engine]:
        """Builds an engine per bandit, so that a bandit learns only from its own rounds and not
        from forced arms.
        """
        return {
            f"bandit {kind}": self.engine(policy, bandit=BanditSettings(kind=kind), **changes)
            for kind in self.bandits
        }


@cache
def measured_pool(
    demo: Path, policy: str, count: int, max_tokens: int, greedy: bool
) -> tuple[Workload, tuple[int, ...]]:
    """The first held-out prompts and the number of tokens each gets, without drafts, fp32."""
    batch = min(count, 64)
    spec = EmbeddedSpec.model_validate(
        {"model_dir": str(demo / policy), "drafter": "off", "max_batch": batch}
    )
    pool = workload(held_out_prompts(demo, count), batch, max_tokens, greedy=greedy)
    answers = decode(EmbeddedEngine(spec), pool, OFF, 1).answers
    return pool, tuple(len(answer.tokens) for answer in answers)


@dataclass(frozen=True, slots=True)
class Findings:
    """Rows and goals of one section."""

    rows: list[Row]
    goals: list[Goal]


def judged(name: str, goal: float, ratio: Ratio) -> Goal:
    """A goal on a ratio; open if the pairs are too few or do not resolve the ratio."""
    return ratio_goal(name, goal, ratio, FEWEST_PAIRS)


def speed_rows(
    section: str, batch: int, runs: Mapping[str, Sequence[TimedRun]], base: str = OFF
) -> list[Row]:
    """Makes a row for each way, with its speed over the base in the same pairs."""
    rows: list[Row] = []
    for name, several in runs.items():
        reference = runs[base][0].answers
        differing = reduce(add, (flips(reference, one.answers) for one in several))
        lengths = [one.accept_length for one in several if one.accept_length is not None]
        rows.append(
            {
                "section": section,
                "batch": batch,
                "way": name,
                "tokens/s": median_rate(several),
                f"over {base}": "" if name == base else str(rate_ratio(several, runs[base])),
                "acceptance length": statistics.median(lengths) if lengths else None,
                "sequences": differing.sequences,
                "flipped": differing.flipped,
                "near-ties": differing.near_ties,
            }
        )

    return rows


def equality_goal(section: str, rows: Sequence[Row]) -> Goal:
    """Goal that in fp32 equal seeds give equal tokens, except at near-ties."""
    compared = sum(int(row["sequences"] or 0) for row in rows)
    wrong = sum(int(row["flipped"] or 0) - int(row["near-ties"] or 0) for row in rows)
    share = 1 - wrong / compared
    return Goal(
        f"{section}: sequences with equal tokens (near-ties left out)", 1.0, share, wrong == 0
    )


def forced(
    engine: Engine, work: Workload, threads: int, arms: Sequence[str] = (OFF, *ARMS)
) -> dict[str, Way]:
    """Makes a way for each arm."""
    return {arm: partial(decode, engine, work, arm, threads) for arm in arms}


def chosen(engines: Mapping[str, Engine], work: Workload, threads: int) -> dict[str, Way]:
    """Makes a way for each bandit."""
    return {name: partial(decode, engine, work, "", threads) for name, engine in engines.items()}


async def arms_and_bandits(plan: Extent) -> Findings:
    """Measures the trained policy at every batch size."""
    engine, bandits = plan.engine("policy_trained"), plan.bandit_engines("policy_trained")
    first = next(iter(bandits))
    rows: list[Row] = []
    goals: list[Goal] = []
    for batch in plan.batches:
        work = plan.work(batch)
        ways = forced(engine, work, plan.threads) | chosen(bandits, work, plan.threads)
        runs = await take_turns(ways, plan.pairs, f"policy_trained, batch {batch}")
        rows += speed_rows("policy_trained, fp32", batch, runs)
        speedup = rate_ratio(runs[first], runs[OFF])
        if batch in PROTOTYPE_RATES and plan.threads == 1:
            rate, floor = median_rate(runs[OFF]), PROTOTYPE_RATES[batch]
            met = rate >= floor if plan.pairs >= FEWEST_PAIRS else None
            goals.append(
                Goal(f"batch {batch}: tokens/s without drafts (prototype's rate)", floor, rate, met)
            )
        goals.append(
            judged(f"batch {batch}: bandit / off", SPEEDUP_GOALS.get(batch, NEVER_BELOW), speedup)
        )
        best = max((OFF, *ARMS), key=lambda arm: median_rate(runs[arm]))
        ratio = rate_ratio(runs[first], runs[best])
        goals.append(
            judged(f"batch {batch}: bandit / best fixed arm, {best}", BEST_ARM_GOAL, ratio)
        )

    return Findings(rows, [*goals, equality_goal("policy_trained", rows)])


async def drafters_of_little_use(plan: Extent) -> Findings:
    """Measures the start policy with its trained drafter and with a random drafter: the worst cost
    of speculation.
    """
    engine = plan.engine("policy_start", drafter="off", arms=())
    bandit = BanditSettings(kind=plan.bandits[0])
    alive = {"bandit, trained drafter": plan.engine("policy_start", bandit=bandit)}
    dead = {"bandit, dead drafter": plan.engine("policy_start", drafter="eagle", bandit=bandit)}
    rows: list[Row] = []
    goals: list[Goal] = []
    for batch in plan.batches:
        work = plan.work(batch, policy="policy_start")
        ways = forced(engine, work, plan.threads, (OFF,)) | chosen(alive | dead, work, plan.threads)
        runs = await take_turns(ways, plan.pairs, f"policy_start, batch {batch}")
        rows += speed_rows("policy_start, fp32", batch, runs)
        for name in (*alive, *dead):
            goals.append(
                judged(
                    f"policy_start, batch {batch}: {name} / off",
                    NEVER_BELOW,
                    rate_ratio(runs[name], runs[OFF]),
                )
            )

    return Findings(rows, [*goals, equality_goal("policy_start", rows)])


async def rollouts(plan: Extent) -> Findings:
    """Measures requests of very different length at once, from the first token to the last."""
    several = 4 if plan.quick else ROLLOUT
    engine = plan.engine("policy_trained", max_batch=several)
    bandits = plan.bandit_engines("policy_trained", max_batch=several)
    first = next(iter(bandits))
    distinct = plan.at_once(several)
    arms = forced(engine, distinct, plan.threads)
    runs = await take_turns(
        arms | chosen(bandits, distinct, plan.threads), plan.pairs, f"rollout, {several} prompts"
    )
    rows = rollout_rows(f"rollout of {several} prompts, fp32", runs)
    goal = judged(
        f"rollout of {several} prompts: bandit / off",
        ROLLOUT_GOAL,
        rate_ratio(runs[first], runs[OFF]),
    )
    return Findings(rows, [goal, equality_goal("rollouts", rows)])


async def rollouts_of_groups(plan: Extent) -> Findings:
    """Measures a training step's requests: samples of each prompt at once, under drafters of
    growing use.

    The goals compare every other bandit with the first.
    """
    several = 4 if plan.quick else ROLLOUT
    rows: list[Row] = []
    goals: list[Goal] = []
    for policy, drafter in GROUP_PAIRS:
        changes = {"drafter": drafter} if drafter else {}
        engine = plan.engine(policy, max_batch=several, **changes)
        bandits = plan.bandit_engines(policy, max_batch=several, **changes)
        distinct = plan.at_once(several)
        work = grouped_work(
            distinct, decode(engine, distinct, OFF, plan.threads), max(2, several // 8)
        )
        ways = forced(engine, work, plan.threads, (OFF,)) | chosen(bandits, work, plan.threads)
        name = f"groups of samples, {policy}, {'fresh' if drafter else 'trained'} drafter"
        runs = await take_turns(ways, plan.pairs, name)
        rows += rollout_rows(f"{name}, fp32", runs)
        first, *others = bandits
        goals += [
            judged(f"{name}: {kind} / {first}", 1.0, rate_ratio(runs[kind], runs[first]))
            for kind in others
        ]

    return Findings(rows, [*goals, equality_goal("groups of samples", rows)])


def rollout_rows(section: str, runs: Mapping[str, Sequence[TimedRun]]) -> list[Row]:
    """Adds seconds and the lengths of the tail to speed_rows."""
    answers = runs[OFF][0].answers
    lengths = sorted(len(answer.tokens) for answer in answers)
    shown = f"{lengths[len(lengths) // 2]} / {lengths[len(lengths) * 9 // 10]} / {lengths[-1]}"
    rows = speed_rows(section, len(answers), runs)
    tokens = runs[OFF][0].tokens
    return [
        {**row, "s": tokens / float(row["tokens/s"] or 1), "length median / p90 / max": shown}
        for row in rows
    ]


def grouped_work(work: Workload, run: TimedRun, groups: int) -> Workload:
    """Makes as many requests from `groups` prompts with equally many samples: every n-th prompt by
    length, the longest included.
    """
    by_length = sorted(range(len(run.answers)), key=lambda i: len(run.answers[i].tokens))
    size = len(by_length) // groups
    prompts = [work.requests[i].prompt for i in by_length[size - 1 :: size]]
    repeated = [prompt for prompt in prompts for _ in range(size)]
    return workload(repeated, len(repeated), work.requests[0].sampling.max_tokens)


async def more_threads(plan: Extent) -> Findings:
    """Compares two threads with one."""
    engine, bandit = plan.engine("policy_trained"), plan.bandit_engines("policy_trained")
    rows: list[Row] = []
    for batch in plan.batches_of((1, 8, 32)):
        work = plan.work(batch)
        ways: dict[str, Way] = {}
        for threads in (1, 2):
            suffix = "" if threads == 1 else ", 2 threads"
            both = forced(engine, work, threads, (OFF,)) | chosen(
                dict([*bandit.items()][:1]), work, threads
            )
            ways |= {name + suffix: way for name, way in both.items()}
        runs = await take_turns(ways, plan.few, f"threads, batch {batch}")
        rows += speed_rows("1 and 2 threads, fp32", batch, runs)
    return Findings(rows, [])
