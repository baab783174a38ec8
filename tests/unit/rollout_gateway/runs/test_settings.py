"""The settings that make two requests for the same samples one request."""

from __future__ import annotations

from paceline.services.rollout_gateway.runs.sample import settings_digest
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb


def test_statistics_of_arms_change_no_sample() -> None:
    plain = rpb.RunTasksRequest(run_seed=1, forced_arm="off")
    told = rpb.RunTasksRequest(run_seed=1, forced_arm="off", arms=[pb.ArmStats(arm="off", pulls=3)])
    assert settings_digest(told) == settings_digest(plain)
    assert settings_digest(rpb.RunTasksRequest(run_seed=2, forced_arm="off")) != settings_digest(
        plain
    )
