"""Every message survives the link."""

from __future__ import annotations

from typing import get_args

import pytest

from paceline.errors import DataLoss
from paceline.ranks.messages import Doing, Impaired, Save, Saved
from paceline.services.drafter_trainer import messages as m

EXAMPLES: list[m.Message] = [
    m.Activate(3, 1, 2, 0, "00-ab-cd-01", [m.RoundCosts(5, 0.5, {"eagle:3_1_4": 1.5}, 1.25)]),
    m.Join(4, [0, 2]),
    m.SlotsJoined(4, 2, 2),
    m.Preempt(3),
    m.NewHead(4, "/spool/policy_head-4"),
    m.Serving(4, 2),
    Save(3),
    m.Attached(2),
    Impaired("a file"),
    Doing("trains", "rows"),
    m.Judged(
        "promoted",
        "eagle",
        5,
        2.5,
        2.25,
        float("inf"),
        survival=(0.75, 0.5),
        path="/candidates/drafter-5",
    ),
    m.Stopped(3, "preempted", 4, 17, 900, 0.5, 1.5, 0.25, 44, {"stale_head": 2}),
    m.Standing(44, 12),
    Saved(3, "/checkpoints/drafter", 44),
]


def test_messages_round_trip() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(m.Message))
    assert [m.MESSAGES.decode(m.MESSAGES.encode(example)) for example in EXAMPLES] == EXAMPLES


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"type": "Unknown"}', b'{"type": "Preempt", "other": 1}']
)
def test_what_is_no_message_is_data_loss(data: bytes) -> None:
    with pytest.raises(DataLoss):
        m.MESSAGES.decode(data)
