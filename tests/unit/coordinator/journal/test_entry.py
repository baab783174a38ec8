"""Journal entries: every event decodes as it was encoded, and invalid entries are rejected."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataLoss
from paceline.services.coordinator.journal.entry import VERSION, JournalEntry
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Service, State
from paceline.services.coordinator.machine.step import EVENTS
from paceline.streams.journal import FIELDS, pack_entry, unpack_entry
from paceline.v1.coordinator_pb2 import StepRecord

NUMBERS = st.integers() | st.floats(allow_nan=False)
FIGURES = (
    NUMBERS
    | st.text()
    | st.none()
    | st.dictionaries(st.text(), NUMBERS)
    | st.lists(NUMBERS).map(tuple)
)


def drawn(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, every field of a dataclass included; no NaN, it equals nothing."""
    if hint == events.Details:
        return st.dictionaries(st.text(), FIGURES)
    if hint is float:
        return st.floats(allow_nan=False)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(drawn, get_args(hint)))
    if get_origin(hint) is tuple and get_args(hint)[1:] != (...,):
        return st.tuples(*map(drawn, get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(drawn(get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: drawn(hints[field.name]) for field in fields(hint)})
    return st.from_type(hint)


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
@settings(deadline=None, max_examples=case_count(50))
@given(data=st.data())
def test_every_event_comes_back_with_every_field(cls: type[events.Event], data: Any) -> None:
    hints = get_type_hints(JournalEntry)
    changes = {name: data.draw(drawn(hints[name])) for name in ("step", "phase", "slots")}
    entry = JournalEntry(data.draw(drawn(cls)), **changes)
    again = JournalEntry.from_json(unpack_entry(pack_entry(entry.to_json())))
    assert again == entry
    assert type(again.event) is cls


def test_a_record_comes_back_with_the_event_that_closed_its_step() -> None:
    record = StepRecord(step=3, policy={"loss": 0.5}, arm_rounds={"off": 2}, tokens_hash="ab")
    entry = JournalEntry(events.StopRequested(1.0), 3, "ready", record=record)
    assert JournalEntry.from_json(unpack_entry(pack_entry(entry.to_json()))) == entry


def test_a_journal_with_other_fields_has_another_version() -> None:
    """Increase VERSION when the digest changes. A run of another version is then refused by its
    version, not by a missing field.
    """
    kinds = (*EVENTS, RunSettings, State)
    named = [(cls.__name__, [field.name for field in fields(cls)]) for cls in kinds]
    digest = hashlib.sha256(repr((sorted(named), FIELDS)).encode()).hexdigest()[:12]
    assert (VERSION, digest) == (10, "1858f1a111e0")


LOST: dict[str, Any] = JournalEntry(
    events.ServiceLost(1.5, Service.GATEWAY, "away"),
    2,
    "rollout",
    ((0, 1, Holder.ENGINE, 4),),
).to_json()


def test_an_entry_is_plain_json_that_reports_read() -> None:
    assert LOST == {
        "v": 10,
        "at_s": 1.5,
        "event": "ServiceLost",
        "data": {"service": "gateway", "message": "away"},
        "step": 2,
        "phase": "rollout",
        "slots": [[0, 1, "engine", 4]],
    }


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"v": 1}, "another version; seen: 1; allowed: 10"),
        ({"event": "Vanished"}, "names an event that is not known here; seen: Vanished"),
        ({"event": None}, "names an event"),
        ({"event": ["ServiceLost"]}, "names an event"),
        ({"data": None}, "is no object of its fields"),
        ({"data": {"service": "gateway"}}, "ServiceLost lacks fields; seen: message"),
        (
            {"data": {"service": "gateway", "message": "away", "kind": "x"}},
            "fields not known here; seen: kind",
        ),
        ({"data": {"service": "kitchen", "message": "away"}}, r"ServiceLost.service .*'kitchen'"),
        ({"data": {"service": "gateway", "message": 7}}, "ServiceLost.message"),
        ({"data": LOST["data"] | {"at_s": 9.0}}, "is no object of its fields"),
        ({"at_s": "noon"}, "ServiceLost.at_s"),
        ({"at_s": None}, "ServiceLost.at_s"),
        ({"step": "2"}, "JournalEntry.step"),
        ({"phase": 7}, "JournalEntry.phase"),
        ({"slots": [[0, 1]]}, r"slots\[0\] has another type"),
        ({"surprise": 1}, "fields not known here; seen: surprise"),
        ({"record": {"step": "x"}}, "record does not decode"),
        ({"record": {"surprise": 1}}, "record does not decode"),
        ({"record": {"\ud800": 1}}, "record does not decode"),
        ({"record": 7}, "record does not decode"),
    ],
)
def test_a_malformed_entry_is_data_loss_that_names_what_is_wrong(
    changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataLoss, match=says):
        JournalEntry.from_json(LOST | changed)


@pytest.mark.parametrize("name", ["at_s", "event", "data", "step", "phase", "slots"])
def test_an_entry_that_lacks_a_field_is_data_loss(name: str) -> None:
    with pytest.raises(DataLoss):
        JournalEntry.from_json({key: value for key, value in LOST.items() if key != name})


@pytest.mark.parametrize("found", [None, 3, "text", []])
def test_what_is_no_object_is_data_loss(found: Any) -> None:
    with pytest.raises(DataLoss, match="another version"):
        JournalEntry.from_json(found)
