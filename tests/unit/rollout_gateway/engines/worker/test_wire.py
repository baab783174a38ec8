"""Messages between gateway and worker survive the socket unchanged."""

from __future__ import annotations

import pytest

from paceline.errors import (
    DataLoss,
    FailedPrecondition,
    InternalError,
    InvalidInput,
    PacelineError,
    WeightsError,
)
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb


@pytest.mark.parametrize(
    "error",
    [
        WeightsError("not prepared", seen=0, allowed=[1], reason="WEIGHTS_NOT_PREPARED"),
        InvalidInput("unknown arm", seen="fast"),
        DataLoss("cut short"),
    ],
)
def test_an_error_keeps_its_class_whatever_its_own_reason(error: PacelineError) -> None:
    again = wire.error_from(wire.failed_to(error), "engine worker 3: ")
    assert type(again) is type(error)
    assert again.reason == error.reason
    assert str(again) == f"engine worker 3: {error}"


def test_a_refused_version_is_what_the_coordinator_gives_up_on() -> None:
    refused = WeightsError("not prepared", reason="WEIGHTS_NOT_PREPARED")
    assert isinstance(wire.error_from(wire.failed_to(refused)), FailedPrecondition)


def test_an_error_of_an_unknown_class_is_internal() -> None:
    again = wire.error_from(pb.CommandFailed(reason="ODD", message="something", family="ODD"))
    assert (type(again), again.reason) == (InternalError, "ODD")
