"""A write without enough space fails with that reason, and the old file stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ResourceExhausted
from paceline.whole_files import DISK_FULL, replace_synced, write_whole

WRITES = """
import json, sys
from pathlib import Path
from paceline.errors import ResourceExhausted
from paceline.whole_files import replace_synced, write_whole
path, big = Path(sys.argv[2]), "x" * 100_000
try:
    if sys.argv[1] == "whole":
        write_whole(path, big)
    else:
        replace_synced(path, big.encode())
except ResourceExhausted as error:
    print(json.dumps([error.reason, str(error)]))
"""


@pytest.mark.parametrize("how", ["whole", "synced"])
def test_a_file_beyond_a_limit_has_no_room_and_leaves_the_one_before(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "kept.json"
    path.write_text("as before")
    limited = ["sh", "-c", 'ulimit -f 16; exec "$@"', "sh"]  # in blocks of 512 bytes
    done = subprocess.run(
        [*limited, sys.executable, "-c", WRITES, how, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    reason, said = json.loads(done.stdout)
    assert reason == DISK_FULL
    assert f"{path} cannot be written" in said
    assert path.read_text() == "as before"


def test_a_file_that_cannot_be_written_for_another_reason_has_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for write in (
        lambda path: write_whole(path, "text"),
        lambda path: replace_synced(path, b"bytes"),
    ):
        with pytest.raises(ResourceExhausted, match="cannot be written") as caught:
            write(tmp_path / "file" / "below")
        assert caught.value.reason != DISK_FULL
