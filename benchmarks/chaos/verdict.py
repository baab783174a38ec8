"""Judges evidence: whether every task was trained once, the right weights served, and tokens equal
the tokens of a run without faults. Shares nothing with the product.

Samples of a step are compared if the same weights served in both runs, bit for bit, and neither run
counted a near-tie. At a near-tie, a token may depend on the other rows of its batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.chaos.remains import BranchHistory, Remains, Sample


@dataclass
class RunVerdict:
    """Findings in words, and the numbers of judged items."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    wrong_weights: list[str] = field(default_factory=list)
    disordered: list[str] = field(default_factory=list)  # versions and steps that do not grow
    differing: list[str] = field(default_factory=list)  # tokens
    samples: int = 0
    trained: int = 0
    reported: Counter[str] = field(default_factory=Counter)  # reason -> samples not trained
    versions: int = 0  # versions with weights compared with a checkpoint
    compared: int = 0  # samples compared with the run without faults
    near_ties: int = 0  # steps left out for near-ties
    not_comparable: int = 0  # samples of steps with other weights

    @property
    def broken(self) -> bool:
        """Whether anything is wrong."""
        found = (self.lost, self.duplicated, self.wrong_weights, self.disordered, self.differing)
        return any(found)


def judge(
    found: Remains, steps: int, prompts: int, samples: int, undisturbed: Remains | None
) -> RunVerdict:
    """Judges a run of `steps` steps with `samples` answers to each of `prompts` tasks."""
    verdict = judge_samples(found, steps, prompts, samples)
    by_sample = _by_sample(found)
    _judge_batches(verdict, found, steps, by_sample)
    _judge_weights(verdict, found, steps, by_sample)
    _judge_order(verdict, found, steps)
    if undisturbed is not None:
        _compare(verdict, found, undisturbed, _wanted(steps, prompts, samples))
    return verdict


def judge_samples(found: Remains, steps: int, prompts: int, samples: int) -> RunVerdict:
    """The part of `judge` that Redis' log alone decides: whether each sample was trained once."""
    verdict, by_sample = RunVerdict(), _by_sample(found)
    wanted = _wanted(steps, prompts, samples)
    verdict.samples = len(wanted)
    for sample in wanted:
        _judge_sample(verdict, sample, by_sample.get(sample, []))
    for sample in set(by_sample) - set(wanted):
        verdict.duplicated.append(f"{sample} was never requested")
    return verdict


def unequal(found: Remains, other: Remains) -> list[str]:
    """Samples with unequal tokens, reward or step of training in the two runs, in words."""
    mine, theirs = (
        {
            sample: [(one.tokens, one.record.get("reward"), one.fates) for _, one in named]
            for sample, named in _by_sample(each).items()
        }
        for each in (found, other)
    )
    return [
        f"{sample} has other tokens, another reward or another fate"
        for sample in sorted(mine.keys() | theirs.keys())
        if mine.get(sample) != theirs.get(sample)
    ]


def _wanted(steps: int, prompts: int, samples: int) -> list[Sample]:
    return [
        (step, f"s{step}.t{task}", number)
        for step in range(steps)
        for task in range(prompts)
        for number in range(samples)
    ]


def _by_sample(found: Remains) -> dict[Sample, list[tuple[str, BranchHistory]]]:
    grouped: dict[Sample, list[tuple[str, BranchHistory]]] = defaultdict(list)
    for name, branch in found.branches.items():
        if branch.record:
            grouped[branch.sample].append((name, branch))
    return grouped


def _judge_sample(
    verdict: RunVerdict, sample: Sample, named: list[tuple[str, BranchHistory]]
) -> None:
    finals = [(name, one) for name, one in named if one.finals]
    trained = [fate for _, one in named for fate in one.fates if fate.startswith("trained:")]
    if len(finals) > 1 or any(one.finals > 1 or one.appended > 1 for _, one in finals):
        verdict.duplicated.append(f"{sample} was entered more than once: {finals[0][0]}")
    if len(trained) > 1:
        verdict.duplicated.append(f"{sample} was trained more than once: {trained}")
    if trained:
        verdict.trained += 1
        if trained[0] != f"trained:{sample[0]}":
            verdict.duplicated.append(f"{sample} was trained in another step: {trained[0]}")
    elif reasons := [one.fates[-1] for _, one in finals if one.fates]:
        verdict.reported[reasons[0]] += 1
    elif reasons := [str(one.record["reason"]) for _, one in named if "reason" in one.record]:
        verdict.reported[f"unpublished:{reasons[0]}"] += 1
    else:
        verdict.lost.append(f"{sample} has {'no fate' if finals else 'no record'}")


def _judge_batches(
    verdict: RunVerdict,
    found: Remains,
    steps: int,
    by_sample: dict[Sample, list[tuple[str, BranchHistory]]],
) -> None:
    """Compares each batch in the checkpoints with the tokens in the log."""
    batches = defaultdict[int, list[BranchHistory]](list)
    for sample, named in by_sample.items():
        for _, one in named:
            if any(fate.startswith("trained:") for fate in one.fates):
                batches[sample[0]].append(one)
                if digest(one.tokens) != one.record["tokens_hash"]:
                    verdict.wrong_weights.append(f"{sample}: the ledger has other tokens")
    trained = 0
    for version, held in sorted(found.batches.items()):
        step = held[-1]["step"]
        if any(one["batch"] != held[-1]["batch"] for one in held):
            verdict.duplicated.append(f"checkpoints of p{version} name several batches")
        order = sorted(
            batches[step], key=lambda one: (one.record["task_index"], one.record["sample_index"])
        )
        if digest(b"".join(one.tokens for one in order)) != held[-1]["batch"]["batch_hash"]:
            verdict.lost.append(f"the batch of step {step} differs from the batch in the ledger")
        trained = sum(len(batches[one]) for one in range(step + 1))
        if held[-1]["trajectories_trained"] != trained:
            seen = held[-1]["trajectories_trained"]
            verdict.duplicated.append(f"p{version} has learned of {seen} samples, not {trained}")


def _judge_weights(
    verdict: RunVerdict,
    found: Remains,
    steps: int,
    by_sample: dict[Sample, list[tuple[str, BranchHistory]]],
) -> None:
    """Checks that the serving weights are the trainer's, and that every token is from the serving
    set.
    """
    for version in sorted({one["policy"] for one in found.serving} - {0}):
        served, saved = found.spooled.get(version, []), found.saved.get(version, [])
        if not served:
            verdict.wrong_weights.append(f"p{version} served and never lay in the spool")
        if served and saved:
            verdict.versions += 1
            if served[-1] != saved[-1]:
                verdict.wrong_weights.append(f"p{version} is not what its checkpoint holds")
    for sample, named in by_sample.items():
        for _, one in named:
            versions = {version for _, _, version in one.spans}
            served_set = found.began.get(sample[0])
            if versions and served_set is not None and versions != {served_set["policy"]}:
                verdict.wrong_weights.append(f"{sample} has tokens of {versions}: {served_set}")


def _judge_order(verdict: RunVerdict, found: Remains, steps: int) -> None:
    for before, after in zip(found.serving, found.serving[1:], strict=False):
        if after["seq"] <= before["seq"] or after["policy"] < before["policy"]:
            verdict.disordered.append(f"{before} was followed by {after}")
    once = list(dict.fromkeys(found.finished))
    if once != list(range(steps)):
        verdict.disordered.append(f"steps were closed in the order {once}")


def _compare(verdict: RunVerdict, found: Remains, other: Remains, wanted: Iterable[Sample]) -> None:
    mine, theirs = _by_sample(found), _by_sample(other)
    ties = {step for one in (found, other) for step, count in one.near_ties.items() if count}
    verdict.near_ties = len(ties)
    for sample in wanted:
        step = sample[0]
        first = [one.tokens for _, one in mine.get(sample, []) if one.tokens]
        second = [one.tokens for _, one in theirs.get(sample, []) if one.tokens]
        if not first or not second or step in ties or not _same_weights(found, other, step):
            verdict.not_comparable += 1
            continue
        verdict.compared += 1
        if first[0] != second[0]:
            verdict.differing.append(f"{sample} has other tokens than without faults")


def _same_weights(one: Remains, other: Remains, step: int) -> bool:
    serving = [each.began.get(step, {}).get("policy") for each in (one, other)]
    if serving[0] == serving[1] == 0:
        return True
    found = [
        each.spooled.get(version if version is not None else -1, [""])[-1]
        for each, version in zip((one, other), serving, strict=True)
    ]
    return found[0] == found[1] != ""


def digest(tokens: bytes) -> str:
    """The project's hash of token ids: sha256 over int32, first 16 hex digits (docs/streams.md)."""
    return hashlib.sha256(tokens).hexdigest()[:16]
