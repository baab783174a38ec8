"""Keeps samples for judging and training, bounded in samples and bytes, and draws from them."""

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from statistics import median_high

import numpy as np

from paceline.services.drafter_trainer.config import BufferConfig
from paceline.services.drafter_trainer.metrics import SAMPLES_DROPPED
from paceline.services.drafter_trainer.rows.sample import FeatureSample


class FeatureBuffer:
    """Training samples, and fresh samples that a gate may judge with before training uses them.

    The samples of one in `judged_every` groups stay fresh until they are released or newer samples
    replace them. So every row can be trained on, and no row judges a drafter that has learned from
    it or from a similar sibling.

    Training begins while a step's long sequences are still being decoded, so early samples are
    short. Of a past step the longer half is kept longest. Draws mix the previous step's long
    samples with this step's early samples (one-step offset sampling, the DataBuffer of FastRL).
    """

    def __init__(self, config: BufferConfig, seed: int) -> None:
        self._config = config
        self._now = deque[FeatureSample]()  # of the newest step
        # Of past steps, in order of arrival.
        self._short, self._long = deque[FeatureSample](), deque[FeatureSample]()
        self._fresh = deque[FeatureSample]()
        self._random = np.random.default_rng(seed)
        self._step = self._previous_step = -1
        self._long_from = 0  # positions of the shortest long sample of the previous step
        # long samples of the previous step, and of this step
        self._long_expected = self._long_arrived = 0
        self._sizes = Counter[str]()  # by head
        self.nbytes = 0
        self.dropped = Counter[str]()

    def __len__(self) -> int:
        return len(self._now) + len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[FeatureSample]:
        """Training samples, in the order of their eviction."""
        return chain(self._short, self._long, self._now)

    @property
    def tokens(self) -> int:
        """Number of training positions."""
        return self._sizes.total()

    def tokens_of(self, known: Iterable[str]) -> int:
        """Number of training positions with one of the `known` policy heads."""
        return sum(self._sizes[head] for head in known)

    def add(self, sample: FeatureSample) -> None:
        """Adds a sample. If samples or bytes exceed the budget, past steps are evicted first, and
        their short samples before all.
        """
        if zlib.crc32(sample.siblings.encode()) % self._config.judged_every:
            self._place(sample)
        else:
            self._fresh.append(sample)
            self.nbytes += sample.nbytes
        if len(self._fresh) > self._config.judged_samples:
            # The oldest fresh sample of the largest group of fresh siblings.
            sizes = Counter(one.siblings for one in self._fresh)
            most = max(sizes.values())
            self.release([next(one for one in self._fresh if sizes[one.siblings] == most)])
        self._evict()

    def release(self, samples: Iterable[FeatureSample]) -> None:
        """Moves samples that have judged to the training samples."""
        leaving = {id(one) for one in samples}
        released = [one for one in self._fresh if id(one) in leaving]
        self._fresh = deque(one for one in self._fresh if id(one) not in leaving)
        for sample in released:
            self.nbytes -= sample.nbytes
            self._place(sample)

    def _evict(self) -> None:
        while len(self) > self._config.samples or self.nbytes > self._config.byte_budget:
            parts = (self._short, self._long, self._now, self._fresh)
            part = next(part for part in parts if part)
            sample = part.popleft()
            if part is self._fresh:
                self.nbytes -= sample.nbytes
            else:
                self._count(sample, -1)
            self.dropped["evicted"] += 1
            SAMPLES_DROPPED.record(reason="evicted")

    def _place(self, sample: FeatureSample) -> None:
        self._count(sample, 1)
        if sample.step > self._step:
            self._begin_step(sample.step)
        is_long = sample.positions >= self._long_from
        if sample.step == self._step:
            self._now.append(sample)
            self._long_arrived += is_long
        else:
            (self._long if is_long else self._short).append(sample)

    def _begin_step(self, step: int) -> None:
        """Makes the newest step the previous one; the longer half of its samples are its long
        samples.
        """
        if self._now:
            self._long_from = median_high(sample.positions for sample in self._now)
            self._previous_step, self._long_arrived = self._step, 0
            short = [sample for sample in self._now if sample.positions < self._long_from]
            self._long_expected = len(self._now) - len(short)
            self._short += short
            self._long += (sample for sample in self._now if sample.positions >= self._long_from)
            self._now.clear()
        self._step = step

    def _count(self, sample: FeatureSample, sign: int) -> None:
        self.nbytes += sign * sample.nbytes
        self._sizes[sample.lm_head_hash] += sign * sample.positions

    def forget(self, keep: Callable[[FeatureSample], bool], reason: str) -> None:
        """Drops the samples that `keep` refuses, and counts them under `reason`."""
        stale = [sample for sample in self._fresh if not keep(sample)]
        self.release(stale)  # to be dropped with the training samples
        for part in (self._now, self._short, self._long):
            for _ in range(len(part)):
                sample = part.popleft()
                if keep(sample):
                    part.append(sample)
                else:
                    self._count(sample, -1)
                    self.dropped[reason] += 1
                    SAMPLES_DROPPED.record(reason=reason)

    def draw(
        self,
        tokens: int,
        *,
        known: Iterable[str],
        at_least: int = 1,
        teach: Callable[[FeatureSample], None] = lambda sample: None,
    ) -> list[FeatureSample]:
        """Draws samples of one of the `known` policy heads, about `tokens` positions, without
        replacement.

        Returns at least `at_least` samples; heads with fewer are left out. Empty without a usable
        sample. A sample longer than the window gives a random stretch. `teach` is called for each
        whole sample before.

        A head is drawn with probability proportional to recency ** (number of newer heads) * its
        positions. So a micro-batch needs one head, and old versions fade. Until this step has
        delivered long samples, a `long_share` of all draws uses the previous step's long samples
        alone. As long samples arrive, that share falls to zero.
        """
        heads = set(known)
        group = list[FeatureSample]()
        # Share of this step's long samples still to arrive, if it has as many as the previous step.
        missing = max(0.0, 1.0 - self._long_arrived / max(self._long_expected, 1))
        if self._random.random() < self._config.long_share * missing:
            held = [sample for sample in self._long if sample.step == self._previous_step]
            group = self._of_one_head(held, heads, at_least)
        group = group or self._of_one_head(self, heads, at_least)
        return self._some(group, tokens, at_least, teach)

    def _of_one_head(
        self, samples: Iterable[FeatureSample], heads: set[str], at_least: int
    ) -> list[FeatureSample]:
        by_head: dict[str, list[FeatureSample]] = {}
        for sample in samples:
            if sample.lm_head_hash in heads:
                by_head.setdefault(sample.lm_head_hash, []).append(sample)
        enough = [group for group in by_head.values() if len(group) >= at_least]
        if not enough:
            return []
        groups = sorted(
            enough, key=lambda group: max(s.policy_version for s in group), reverse=True
        )
        weights = np.array(
            [
                self._config.recency**age * sum(s.positions for s in group)
                for age, group in enumerate(groups)
            ]
        )
        return groups[int(self._random.choice(len(groups), p=weights / weights.sum()))]

    def _some(
        self,
        group: Sequence[FeatureSample],
        tokens: int,
        at_least: int,
        teach: Callable[[FeatureSample], None],
    ) -> list[FeatureSample]:
        drawn, room = list[FeatureSample](), tokens
        for index in self._random.permutation(len(group)):
            sample = group[index]
            room -= min(sample.positions, self._config.window)
            if len(drawn) >= at_least and room < 0:
                break
            teach(sample)
            drawn.append(sample.window(self._config.window, self._random))
        return drawn

    def fresh(
        self, known_heads: Iterable[str], at_least: int = 1, groups: int = 1
    ) -> list[FeatureSample]:
        """Fresh samples of the newest policy version with any. The end of the list has one of each
        group, before it a second one of each, and so on; equal ranks are oldest first.

        If these have fewer than `at_least` drafting targets or fewer than `groups` groups, samples
        of earlier versions are added, newest versions first. Short responses must not prevent
        judgements.
        """
        known = set(known_heads)
        usable = [sample for sample in self._fresh if sample.lm_head_hash in known]
        taken: list[FeatureSample] = []
        for version in sorted({sample.policy_version for sample in usable}, reverse=True):
            taken = [*(sample for sample in usable if sample.policy_version == version), *taken]
            kinds = len({sample.siblings for sample in taken})
            if kinds >= groups and sum(sample.targets for sample in taken) >= at_least:
                break
        return _in_turn(taken)

    def newest(self, known_heads: Iterable[str]) -> list[FeatureSample]:
        """All samples of the newest policy version with any, fresh or not, in the order of `fresh`.
        If the drafter does not learn, all its samples are fresh.
        """
        known = set(known_heads)
        usable = [one for one in chain(self, self._fresh) if one.lm_head_hash in known]
        version = max((one.policy_version for one in usable), default=0)
        return _in_turn([one for one in usable if one.policy_version == version])


def _in_turn(samples: Sequence[FeatureSample]) -> list[FeatureSample]:
    """The newest sample of each group last, before them the second newest of each, and so on."""
    newer = Counter[str]()
    turns = list[int]()
    for sample in reversed(samples):
        turns.append(-newer[sample.siblings])
        newer[sample.siblings] += 1
    return [one for _, one in sorted(zip(reversed(turns), samples, strict=True), key=itemgetter(0))]
