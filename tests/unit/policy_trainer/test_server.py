"""The parent process: it starts without torch, and rejects configurations it cannot train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson

from paceline.errors import ConfigError, DataLoss, FailedPrecondition, WeightsError
from paceline.local.patience import patient
from paceline.models.config import check_model
from paceline.ranks.messages import Failed
from paceline.services.policy_trainer.audit import AuditCell, AuditState, PathVerdict
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.messages import (
    MESSAGES,
    Batched,
    BatchFacts,
    News,
    Progress,
    Pushed,
    StepFacts,
    Stepped,
    Train,
    Wanted,
)
from paceline.services.policy_trainer.server import (
    PolicyServicer,
    _response,
    require_fresh,
)
from paceline.v1 import policy_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext


@pytest.mark.slow
def test_the_parent_imports_no_torch() -> None:
    code = (
        "import sys, paceline.services.policy_trainer.server; print([m for m in ('torch', 'transformers') if m "
        "in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_models_and_directories_that_cannot_be_trained_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Hugging Face directory"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ConfigError, match="GPT2"):
        check_model(tmp_path)
    require_fresh(tmp_path / "new", resume=False)
    require_fresh(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="resume=true"):
        require_fresh(tmp_path, resume=False)


async def test_a_step_on_fewer_slots_than_ranks_is_refused(tmp_path: Path) -> None:
    about = {"run": {"id": "r", "dir": str(tmp_path)}, "ranks": 2}
    config = PolicyTrainerConfig.model_validate(about)
    servicer = PolicyServicer(config)
    with pytest.raises(FailedPrecondition, match="seen: 1 slots; allowed: 2 or more"):
        await anext(servicer.TrainStep(pb.TrainStepRequest(slots=[0]), None))


BEYOND = PathVerdict("reused", 300, 0.5, 2.0, 0.0005, 0.005)


def test_every_field_of_the_news_of_a_step_is_sent() -> None:
    batch = BatchFacts(8, 90, {"stale": 1}, {"0": 7, "2": 1}, 1, 0.5, 0.25, "ab")
    figures = StepFacts({"loss": 0.1, "behavior_k3": 0.7}, 0.6, 2, 1)
    news: list[News] = [
        Batched(4, batch),
        Stepped(4, Progress(8, 7, 128, 0, batch, figures, beyond=(BEYOND,))),
        Pushed(4, 8, 100, 0.5, "cd", replaced=True),
    ]
    for one in news:
        response = _response(one)
        sent = getattr(response, str(response.WhichOneof("event")))
        listed = {field.name for field, _ in sent.ListFields()}
        assert listed == set(sent.DESCRIPTOR.fields_by_name)
    stepped = _response(news[1]).stepped
    assert (stepped.figures["loss"], stepped.reward_mean) == (0.1, 0.5)
    assert (stepped.beyond[0].path, stepped.beyond[0].upper_bound) == ("reused", 0.005)


def test_messages_and_errors_come_back_as_they_went() -> None:
    context = CommandContext(run_id="r", step=7, epoch=2, lease_proof="proof")
    wanted = Wanted(7, 7, (("g", 8),), 2.5, frozenset({"g"}))
    train = Train(wanted, MessageToJson(context), {"traceparent": "00-a-b-01"}, 4)
    back = MESSAGES.decode(MESSAGES.encode(train))
    assert isinstance(back, Train)
    assert back == train
    assert back.sender() == context
    audit = AuditState({"cell": AuditCell(3, 0.5, {"7": 3})}, {"other": True}, ("reused",))
    batch = BatchFacts(dropped={"stale": 1})
    stepped = Stepped(4, Progress(8, 7, 128, 0, batch, audit=audit, beyond=(BEYOND,)))
    assert MESSAGES.decode(MESSAGES.encode(stepped)) == stepped
    error = Failed.of(4, WeightsError("no", reason="STEP_ORDER", seen=1, allowed=2)).error()
    assert isinstance(error, WeightsError)
    assert (error.reason, str(error)) == ("STEP_ORDER", "no; seen: 1; allowed: 2")
    with pytest.raises(DataLoss):
        MESSAGES.decode(b'{"type": "Nothing"}')
