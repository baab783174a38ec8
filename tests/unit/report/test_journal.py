"""A run read from its journal."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from slot_overlaps import overlaps

from paceline.errors import DataLoss
from paceline.report.journal import ACCURACY, PROBE, RunHistory, read_history, write_steps
from paceline.streams.journal import pack_entry


def test_records_evaluations_and_sets_are_found(history: RunHistory) -> None:
    assert [record.step for record in history.records] == list(range(30))
    assert history.records[29].arm_rounds["ngram:4_1_5"] == 12
    assert [step for step, _ in history.evaluated(ACCURACY)] == [0, 10, 20, 30]
    assert history.evaluated(PROBE)[-1] == (30, pytest.approx(4.0))
    assert history.records[29].evaluations["accept_length_probe"] == pytest.approx(4.0)
    assert not history.records[28].evaluations
    assert [served.policy for served in history.served] == list(range(31))
    assert history.phase == "finished"
    assert history.slots == 2


def test_drafter_time_comes_from_leases_that_overlap_nothing(
    history: RunHistory, synthetic: ModuleType
) -> None:
    leases = [one for one in history.intervals if one.holder == "drafter"]
    assert sum(one.seconds for one in leases) == pytest.approx(30 * synthetic.DRAFTER_S)
    assert overlaps(history.intervals) == []


def test_time_without_a_coordinator_is_told_apart(tmp_path: Path, synthetic: ModuleType) -> None:
    entries = list(synthetic.entries(2))
    resumed = [entry | {"at_s": entry["at_s"] + 100.0} for entry in entries[-3:]]
    middle = {
        "v": 1,
        "at_s": resumed[0]["at_s"] - 1.0,
        "event": "Resumed",
        "data": {"total_steps": 2},
        "step": 1,
    }
    lines = [*entries[:-3], middle | {"phase": "rollout", "slots": []}, *resumed]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(pack_entry(line) + b"\n" for line in lines))
    history = read_history(tmp_path / "journal.jsonl")
    assert history.away_s == pytest.approx(middle["at_s"] - entries[-4]["at_s"])


def test_so_is_the_time_in_which_a_run_was_paused(tmp_path: Path, synthetic: ModuleType) -> None:
    entries = list(synthetic.entries(2))
    began = next(i for i, entry in enumerate(entries) if entry["step"] == 1)
    resting = entries[began - 1] | {"phase": "paused"}
    asked = resting | {"event": "Paused", "data": {}, "at_s": resting["at_s"] + 5.0, "slots": []}
    continued = asked | {"event": "Continued", "phase": "ready", "at_s": resting["at_s"] + 50.0}
    later = [entry | {"at_s": entry["at_s"] + 50.0} for entry in entries[began:]]
    lines = [*entries[: began - 1], resting, asked, continued, *later]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(pack_entry(line) + b"\n" for line in lines))
    history = read_history(tmp_path / "journal.jsonl")
    assert history.away_s == pytest.approx(50.0)
    assert history.ended_s - history.began_s == pytest.approx(
        entries[-1]["at_s"] - entries[0]["at_s"] + 50.0
    )


def test_what_a_journal_tells_twice_counts_once(
    tmp_path: Path, history: RunHistory, synthetic: ModuleType
) -> None:
    twice = [entry for entry in synthetic.entries(30) for _ in range(2)]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(pack_entry(entry) + b"\n" for entry in twice))
    again = read_history(tmp_path / "journal.jsonl")
    assert (again.drafter_tokens, again.decisions) == (history.drafter_tokens, history.decisions)
    assert again.served == history.served


def test_an_amended_record_replaces_the_first(tmp_path: Path, synthetic: ModuleType) -> None:
    entries = list(synthetic.entries(1))
    closing = next(entry for entry in entries if entry.get("record"))
    entries.append(closing | {"record": closing["record"] | {"evaluations": {"accuracy": 0.75}}})
    (tmp_path / "journal.jsonl").write_bytes(
        b"".join(pack_entry(entry) + b"\n" for entry in entries)
    )
    assert read_history(tmp_path / "journal.jsonl").records[0].evaluations["accuracy"] == 0.75


def test_steps_are_written_with_the_names_of_the_proto(tmp_path: Path, history: RunHistory) -> None:
    write_steps(tmp_path / "steps.jsonl", history.records)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(lines) == 30
    assert lines[7]["tokens_hash"] == f"{7:016x}"


@pytest.mark.parametrize("text", ["", "{broken\n"])
def test_a_journal_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(DataLoss):
        read_history(tmp_path / "journal.jsonl")
