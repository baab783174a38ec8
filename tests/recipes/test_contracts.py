"""A setting, a journal event and a message's field, added as CONTRIBUTING.md says: in at most two
places, and used by the service or read back by its own reader.
"""

from __future__ import annotations

import shutil

import pytest
from recipes.checkout import CLI, ROOT, Change, Checkout, places

SETTING = (
    Change(
        "services/rollout_gateway/config.py",
        "    twin_s: float = Field(default=3, gt=0)\n",
        "    sessions: SessionsConfig = ",
    ),
)
MACHINE = "services/coordinator/machine"
EVENT = (
    Change(
        f"{MACHINE}/events.py",
        "@dataclass(frozen=True, slots=True)\nclass Twinned(Event):\n"
        '    """A twin came."""\n\n    kind: str\n    service: Service\n    versions: VersionSet\n\n\n',
        "@dataclass(frozen=True, slots=True)\nclass Resumed(Event):",
    ),
    Change(f"{MACHINE}/step.py", "    Twinned,\n", "    WorkerLost,\n)"),
    Change(
        f"{MACHINE}/step.py",
        "    Twinned: EventRow(LIVE, none, lambda state, event: Decision(state)),\n",
        "    Resumed: EventRow(",
    ),
)
READ_BACK = """
import asyncio, sys
from coordinator.journal.entry import EntryBody, JournalEntry
from coordinator.journal.journal import Journal
from coordinator.machine.events import Twinned
from coordinator.machine.state import Phase, Service
from paceline.streams import connect
from paceline.trajectory import VersionSet


async def main(url, run_id):
    client = connect(url)
    event = Twinned(1.5, kind="identical", service=Service.GATEWAY, versions=VersionSet(3, 2, 1))
    assert [one async for one in Journal(client, run_id).entries()] == []
    journal = Journal(client, run_id)
    await journal.append(JournalEntry(event, EntryBody(0, Phase.READY)))
    again = [one.event async for one in Journal(client, run_id).entries()]
    assert again == [event], again
    await client.aclose()


asyncio.run(main(*sys.argv[1:]))
"""
FIELD = (
    Change(
        "proto/paceline/v1/rollout.proto",
        "  // Seconds.\n  double twin_s = 77;\n",
        "  // Position among the siblings.\n  uint32 sample_index = 3;\n  // Worker that ran it.\n",
    ),
)


def test_a_new_setting_is_taken_checked_and_printed(checkout: Checkout) -> None:
    checkout.change(SETTING)
    assert places(SETTING) <= 2
    serve = (CLI, "serve", "gateway", "--print-config")
    assert "twin_s = 5.0" in checkout.python(*serve, "twin_s=5").stdout
    refused = checkout.python(*serve, "twin_s=-1")
    assert refused.returncode == 2
    assert "twin_s" in refused.stderr


def test_a_new_journal_event_is_written_and_read_back_whole(
    checkout: Checkout, redis_url: str, run_id: str
) -> None:
    checkout.change(EVENT)
    assert places(EVENT) <= 2
    done = checkout.python(READ_BACK, redis_url, run_id)
    assert done.returncode == 0, done.stderr


def test_a_new_field_of_a_message_goes_over_the_wire(checkout: Checkout) -> None:
    shutil.copytree(ROOT / "proto", checkout.root / "proto")
    shutil.rmtree(checkout.root / "libs" / "paceline" / "v1")
    checkout.change(FIELD)
    assert places(FIELD) <= 2
    pytest.importorskip("grpc_tools")
    protos = sorted(str(path) for path in (checkout.root / "proto").rglob("*.proto"))
    out = [f"--{kind}_out=libs" for kind in ("python", "pyi", "grpc_python")]
    generate = "import sys; from grpc_tools.protoc import main; sys.exit(main(sys.argv))"
    made = checkout.python(generate, f"-I{checkout.root}/proto", *out, *protos)
    assert made.returncode == 0, made.stderr
    code = (
        "from paceline.v1.rollout_pb2 import SampleFinished as M\n"
        "assert M.FromString(M(twin_s=2.5).SerializeToString()).twin_s == 2.5"
    )
    done = checkout.python(code)
    assert done.returncode == 0, done.stderr
