"""Every message survives the link."""

from __future__ import annotations

from typing import get_args

from drafter_trainer import messages as m

CONTENDER = m.Contender("lstm", 2.5, 0.125, 1.5, 40, 4, servable=False)
EXAMPLES: list[m.Message] = [
    m.Activate(3, 1, 2, 0, "00-ab-cd-01", {"eagle:3_1_4": 1.5}),
    m.Preempt(3),
    m.NewHead(4, "/spool/policy_head-4"),
    m.Serving(4, 2),
    m.Save(),
    m.Attached(3, 2),
    m.Saving(7, 0.25),
    m.Judged(
        3,
        "promoted",
        "eagle",
        5,
        2.5,
        2.25,
        float("inf"),
        survival=[0.75, 0.5],
        lengths_by_bucket={"late": 2.5},
        leaderboard=[CONTENDER],
        path="/candidates/drafter-5",
    ),
    m.Stopped(3, "preempted", 4, 17, 900, 0.5, 1.5, 44, {"stale_head": 2}),
    m.Standing(5, 44, 9_000, 12, 1 << 20, ["00ff", "11ff"], 4, True, [CONTENDER]),
    m.Saved("/checkpoints/drafter", 44),
]


def test_every_message_comes_back_as_it_went() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(m.Message))
    assert [m.MESSAGES.decode(m.MESSAGES.encode(example)) for example in EXAMPLES] == EXAMPLES
