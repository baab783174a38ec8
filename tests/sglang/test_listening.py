"""No other user reaches the project's SGLang, and a killed SGLang leaves no file."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from listening import beyond_loopback, open_doors
from sglang_served import DEMO, Served

from paceline.local.patience import patient
from paceline.local.user_directory import locked_directory

SHARED_MEMORY = Path("/dev/shm")
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def mapped_memory(processes: list[int]) -> set[Path]:
    """Named shared memory that the processes have mapped, without memory of parallel tests."""
    mapped = ""
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended
            mapped += Path(f"/proc/{pid}/maps").read_text()
    return {path for path in SHARED_MEMORY.iterdir() if str(path) in mapped}


def test_its_two_ranks_listen_on_loopback_alone_and_what_they_leave_is_swept(
    temporary: Path, tmp_path: Path
) -> None:
    served = Served(
        tmp_path,
        model_dir=str(DEMO / "policy_start"),
        drafter="ngram",
        tensor_parallel_size=2,
        max_sequence_tokens=256,
    )
    family = [served.client.process.pid]
    family += [one.pid for one in psutil.Process(family[0]).children(recursive=True)]
    inet, unix = open_doors(psutil.Process(pid) for pid in family)
    assert beyond_loopback(inet) == []
    assert inet  # gloo between the two ranks
    assert {path for path in unix if not Path(path).is_relative_to(temporary)} == set()
    assert list(temporary.rglob("store")) != []
    until = time.monotonic() + patient(20)
    while not list(temporary.rglob("elsewhere/*")):  # SGLang's host learns of its end last
        assert time.monotonic() < until
        time.sleep(0.05)
    memory = mapped_memory(family)
    assert memory != set()

    processes = [psutil.Process(pid) for pid in family]
    for process in processes:
        process.kill()
    served.client.process.wait()
    psutil.wait_procs(processes, timeout=patient(10))
    served.client.close()
    assert list(temporary.rglob("store")) != []
    assert {path for path in memory if path.exists()} != set()
    own = locked_directory(temporary / next(iter(temporary.iterdir())) / "live")
    user = own.parent.parent
    assert {*temporary.rglob("*")} == {user, user / "ports", own.parent, own}
    assert {path for path in memory if path.exists()} == set()
