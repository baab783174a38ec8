"""Heads on disk: newer versions remove the directory that a rank is about to read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from unit.drafter_trainer.samples import HIDDEN, TARGET, VOCABULARY
from whole_versions import build_manifest

from paceline.errors import DataLoss, InvalidInput
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.driver import DrafterDriver
from paceline.services.drafter_trainer.rows.sample import EMBED, read_spooled_head
from paceline.tensors import from_numpy
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY_HEAD
from paceline.weights import Spool


def spooled(spool: Spool, version: int, rows: int = VOCABULARY) -> Path:
    array = np.full((rows, HIDDEN), version, dtype=np.float32)
    manifest = build_manifest(WEIGHT_TARGET_POLICY_HEAD, version, [from_numpy(EMBED, array)])
    return spool.write(manifest, array.tobytes())


def test_a_head_that_has_left_the_spool_is_left_out_and_a_damaged_one_is_named(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path)
    path = spooled(spool, 3)
    head = read_spooled_head(path, 3, TARGET)
    assert head is not None
    assert (head.policy_version, float(head.lm_head[0, 0])) == (3, 3.0)
    with pytest.raises(InvalidInput, match="another shape"):
        read_spooled_head(spooled(spool, 4, rows=VOCABULARY + 1), 4, TARGET)
    (path / "manifest.json").unlink()
    with pytest.raises(DataLoss, match="manifest"):
        read_spooled_head(path, 3, TARGET)
    shutil.rmtree(path)
    assert read_spooled_head(path, 3, TARGET) is None


async def test_restarted_ranks_are_sent_only_heads_that_are_still_spooled(tmp_path: Path) -> None:
    driver = DrafterDriver(DrafterTrainerConfig.model_validate({"run": {"dir": str(tmp_path)}}))
    spool = Spool(tmp_path / "spool")
    paths = {version: spooled(spool, version) for version in (1, 2, 3)}
    for version, path in paths.items():
        await driver.send_fact(m.NewHead(version, str(path)))
    await driver.send_fact(m.Serving(3, 0))
    spool.discard(WEIGHT_TARGET_POLICY_HEAD, 1)
    kept = [m.NewHead(version, str(paths[version])) for version in (2, 3)]
    assert driver.lasting_facts() == [*kept, m.Serving(3, 0)]
