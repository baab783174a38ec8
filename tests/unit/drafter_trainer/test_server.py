"""The service's messages carry every field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.server import _detached, _gate

FILLED: dict[Any, Any] = {int: 3, float: 0.5, bool: True, str: "promoted"}


def filled(kind: type[Any]) -> Any:
    """Every field of another value than its default."""
    hints = get_type_hints(kind)
    made = {
        "survival": [0.5],
        "serving_survival": [0.25],
        "dropped": {"stale_head": 2},
    }
    return kind(
        **{one.name: made.get(one.name, FILLED.get(hints[one.name])) for one in fields(kind)}
    )


def test_every_field_of_a_decision_and_of_an_end_is_sent() -> None:
    for sent in (_gate(filled(m.Judged)).gate, _detached(filled(m.Stopped)).detached):
        listed = {field.name for field, _ in sent.ListFields()}
        assert listed == set(sent.DESCRIPTOR.fields_by_name)


def test_a_decision_is_sent_under_the_names_of_the_wire() -> None:
    judged = replace(filled(m.Judged), candidate=2.5, serving=1.5, decision="kept")
    gate = _gate(judged).gate
    assert (gate.candidate_accept_length, gate.serving_accept_length) == (2.5, 1.5)
    assert not gate.promoted
