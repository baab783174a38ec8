"""Counts the accepted drafts of each running request, and expects tokens of its next round.

A request's own rounds shift its group's chances: a Beta prior of ROW_STRENGTH trials.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.services.rollout_gateway.bandits.base import RowFacts
from paceline.services.rollout_gateway.bandits.cost_model.positions import DraftSpan

ROW_STRENGTH = 12.0  # trials that the group is worth to a request
ROW_KEEP = 1.0 - 1.0 / 64  # of a request's evidence, per round of it
FIRST_SLOTS = 64

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class RowAcceptance:
    """Drafts accepted of each running request, by slot; a slot is a row of the tables here, not of
    the engine.
    """

    def __init__(self, positions: int, spans: Sequence[DraftSpan | None]) -> None:
        self._accepted = np.zeros((FIRST_SLOTS, positions))
        self._trials = np.zeros((FIRST_SLOTS, positions))
        # [slots, A] expected in a round of each arm
        self.tokens: Floats = np.ones((FIRST_SLOTS, len(spans)))
        # response tokens: so far, at most
        self.generated = np.zeros(FIRST_SLOTS)
        self.limits = np.zeros(FIRST_SLOTS)
        self._free = list(range(FIRST_SLOTS - 1, -1, -1))
        self._slots: dict[int, int] = {}
        counts, places = np.arange(positions + 1)[:, None], np.arange(positions)
        # By drafts accepted and position; a draft was tried when the one before it was accepted.
        self._hits = (places < counts).astype(np.float64)
        self._tried = (places <= counts).astype(np.float64)
        families = {span.family for span in spans if span is not None}
        self._arms = {
            family: [
                index
                for index, span in enumerate(spans)
                if span is not None and span.family == family
            ]
            for family in families
        }  # by family: its arms, and the last drafts of each
        self._lasts = {
            family: [span.steps - 1 for span in spans if span is not None and span.family == family]
            for family in families
        }

    def follow(self, rows: Sequence[RowFacts], tokens: Sequence[float]) -> tuple[Counts, list[int]]:
        """As GroupAcceptance.follow; `tokens` [A] is what new requests are expected to be given."""
        known, ended = self._slots, []
        slots = [known.get(row[0], -1) for row in rows]
        if -1 in slots:
            slots = [
                self._begin(row, tokens) if slot < 0 else slot
                for row, slot in zip(rows, slots, strict=True)
            ]
        if len(known) > len(rows):
            for request_id in known.keys() - {row[0] for row in rows}:
                slot = known.pop(request_id)
                ended.append(int(self.generated[slot]))
                self._free.append(slot)
        return np.array(slots), ended

    def _begin(self, row: RowFacts, tokens: Sequence[float]) -> int:
        # requests that are not ours share an id, hence a slot
        slot = self._slots.get(row.request_id)
        if slot is None:
            slot = self._slots[row.request_id] = self._take()
        self._accepted[slot] = self._trials[slot] = 0.0
        self.tokens[slot] = tokens
        self.generated[slot] = row.generated
        self.limits[slot] = row.limit
        return slot

    def advance(self, slots: Counts, taken: Counts) -> Flags:
        """A round gave the requests in `slots` [B] so many tokens [B]; whether each may go on."""
        generated = self.generated[slots] + taken
        self.generated[slots] = generated
        return generated < self.limits[slots]

    def _take(self) -> int:
        if not self._free:
            size = len(self._trials)
            tables = (self._accepted, self._trials, self.tokens)
            self._accepted, self._trials, self.tokens = (
                np.concatenate((one, one)) for one in tables
            )
            self.generated, self.limits = np.tile(self.generated, 2), np.tile(self.limits, 2)
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def observe(
        self, slots: Counts, span: DraftSpan, accepted: Counts, more: Flags, group: Floats
    ) -> None:
        """Count a round's drafts for the requests in `slots` [B]; group: chances of the group's
        positions [P].
        """
        hits, tried = self._hits[accepted, : span.steps], self._tried[accepted, : span.steps]
        if not more.all():
            tried = np.where(more[:, None], tried, hits)
        known, seen = self._accepted[slots], self._trials[slots]
        known *= ROW_KEEP
        seen *= ROW_KEEP
        known[:, span.first : span.end] += hits
        seen[:, span.first : span.end] += tried
        self._accepted[slots], self._trials[slots] = known, seen
        arms, lasts = self._arms[span.family], self._lasts[span.family]
        part = slice(span.first, span.first + max(lasts) + 1)
        chances = (known[:, part] + ROW_STRENGTH * group[part]) / (seen[:, part] + ROW_STRENGTH)
        sums = chances.cumprod(axis=1).cumsum(axis=1)
        self.tokens[slots[:, None], arms] = 1.0 + sums[:, lasts]

    def forget(self, span: DraftSpan, tokens: Sequence[float]) -> None:
        """A family drafts otherwise from now on: it is expected to give every request as much,
        `tokens` [A].
        """
        self._accepted[:, span.first : span.end] = self._trials[:, span.first : span.end] = 0.0
        arms = self._arms[span.family]
        self.tokens[:, arms] = [tokens[arm] for arm in arms]
