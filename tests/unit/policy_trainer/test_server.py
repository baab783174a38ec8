"""The parent: it starts without torch, and refuses what cannot be trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError, DataLoss, WeightsError
from paceline.local.patience import patient
from paceline.ranks.messages import Failed
from policy_trainer.messages import MESSAGES, BatchFacts, Progress, Sender, Stepped, Train
from policy_trainer.server import check_model, require_fresh


def test_the_parent_imports_no_torch() -> None:
    code = (
        "import sys, policy_trainer.server; print([m for m in ('torch', 'transformers') if m "
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
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="gpt2"):
        check_model(tmp_path)
    require_fresh(tmp_path / "new", resume=False)
    require_fresh(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="resume=true"):
        require_fresh(tmp_path, resume=False)


def test_messages_and_errors_come_back_as_they_went() -> None:
    train = Train(4, Sender("r", 7, 2, {"traceparent": "00-a-b-01"}), 7, [("g", 8)], 2.5)
    back = MESSAGES.decode(MESSAGES.encode(train))
    assert isinstance(back, Train)
    assert (back.sender, [tuple(group) for group in back.groups]) == (train.sender, train.groups)
    stepped = Stepped(4, Progress(8, 7, 128, 0, BatchFacts(dropped={"stale": 1})))
    assert MESSAGES.decode(MESSAGES.encode(stepped)) == stepped
    error = Failed.of(4, WeightsError("no", reason="STEP_ORDER", seen=1, allowed=2)).error()
    assert isinstance(error, WeightsError)
    assert (error.reason, str(error)) == ("STEP_ORDER", "no; seen: 1; allowed: 2")
    with pytest.raises(DataLoss):
        MESSAGES.decode(b'{"type": "Nothing"}')
