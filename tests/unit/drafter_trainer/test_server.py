"""The service's messages carry every field."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from paceline.errors import DeadlineExceeded
from paceline.rpc import EPOCHS, EpochGuard
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.driver import DrafterDriver, Lease
from paceline.services.drafter_trainer.server import DrafterServicer, _detached, _gate
from paceline.v1.trajectory_pb2 import CommandContext

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


async def test_news_before_the_training_does_not_extend_its_deadline(tmp_path: Path) -> None:
    config = DrafterTrainerConfig.model_validate({"run": {"dir": str(tmp_path)}})
    guard = EpochGuard(config.security, tmp_path / EPOCHS)
    servicer = DrafterServicer(config, DrafterDriver(config), guard)
    lease, loop = Lease(1, 0.5, {0: 0.0}), asyncio.get_running_loop()
    decision = filled(m.Judged)

    def decide(left: int) -> None:
        lease.news.put_nowait(replace(decision, decision="kept"))
        if left:
            loop.call_later(0.1, decide, left - 1)

    decide(100)
    try:
        async with asyncio.timeout(8.0):
            with pytest.raises(DeadlineExceeded, match="has not begun in time"):
                async for _ in servicer._news(lease, CommandContext()):
                    pass
    finally:
        await servicer.close()
