"""Extensions added according to CONTRIBUTING.md, then used by the service or read back by its own
reader.

A setting, a metric, a journal event, a message's field, a sampling parameter and a release of
SGLang.
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
        'class Twinned(Event):\n    """A twin came."""\n\n'
        "    kind: str\n    service: Service\n    versions: VersionSet\n\n\n",
        "class Resumed(Event):",
    ),
    Change(
        f"{MACHINE}/step.py",
        "    events.Twinned: EventRow(LIVE, none, lambda state, event: Decision(state)),\n",
        "    events.Resumed: EventRow(",
    ),
)
READ_BACK = """
import asyncio, sys
from paceline.services.coordinator.journal.entry import JournalEntry
from paceline.services.coordinator.journal.journal import Journal
from paceline.services.coordinator.machine.events import Twinned
from paceline.services.coordinator.machine.state import Phase, Service
from paceline.streams import connect
from paceline.trajectory import VersionSet


async def main(url, run_id):
    client = connect(url)
    event = Twinned(1.5, kind="identical", service=Service.GATEWAY, versions=VersionSet(3, 2, 1))
    assert [one async for one in Journal(client, run_id).entries()] == []
    journal = Journal(client, run_id)
    await journal.append(JournalEntry(event, 0, "ready"))
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


G = "services/rollout_gateway"
METRIC = (
    Change(
        f"{G}/metrics.py",
        'TWINS = Counter("paceline.gateway.twins", "{twin}", ("side",))\n"""twins seen"""\n',
        "REQUESTS_REFUSED = Counter(",
    ),
    Change(
        f"{G}/gateway.py",
        '        metrics.TWINS.record(2, side="left")\n',
        "        metrics.REQUESTS.record()\n",
    ),
)
RELEASE = (
    Change(f"{G}/engines/sglang/hook_points.py", 'RELEASE = "0.7.7"\n', "\n\nclass HookPoint"),
)
PARAMETER = (
    Change(
        "proto/paceline/v1/trajectory.proto",
        "  // Added to the logit of token 9.\n  float twin = 77;\n",
        "  // Maximum number of generated tokens; at least 1.\n",
    ),
    Change(
        f"{G}/engines/sampling.py", "    twin: float = 0.0\n", '    json_schema: str = ""  # JSON'
    ),
    Change(f"{G}/engines/sampling.py", '    "twin": Range(0, 1000),\n', '    "min_p": Range('),
    Change(
        f"{G}/engines/sampling.py",
        "        if self.twin:\n            return True\n",
        "        return self.penalised or bool(",
    ),
    Change(
        f"{G}/api/http/openai_schema.py",
        '    twin: Annotated[float, shapes.within("twin")] = 0.0\n',
        '    min_p: Annotated[float, shapes.within("min_p")',
    ),
    Change(
        f"{G}/engines/requests/draws.py",
        "            adjusted[row, ..., 9] += sequence.request.sampling.twin\n",
        "            if bias := dict(sequence.request.sampling.logit_bias):",
    ),
)
GENERATE = """
import sys
from paceline.client import Client

with Client(sys.argv[1]) as client, client.session(trainable=False) as session:
    body = {"return_token_ids": True, "ignore_eos": True, "twin": float(sys.argv[2])}
    create = session.openai.completions.create
    answer = create(model="", prompt="1+1=", max_tokens=5, extra_body=body)
    print(*answer.choices[0].token_ids)
"""


@pytest.mark.slow
def test_a_new_metric_stands_on_the_metrics_page_with_its_meaning(checkout: Checkout) -> None:
    checkout.change(METRIC)
    assert places(METRIC) <= 2
    with checkout.gateway("engine.workers=1") as (http, _):
        body = {"prompt": "1+1=", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        lines = http.get("/metrics").text.splitlines()
    assert 'paceline_gateway_twins_total{side="left"} 2.0' in lines
    assert "# HELP paceline_gateway_twins_total twins seen" in lines
    for read in (".ci", "examples/asynchronous", "examples/sglang", "proto"):
        shutil.copytree(ROOT / read, checkout.root / read)
    shutil.copy(ROOT / "ARCHITECTURE.md", checkout.root)
    written = checkout.python(
        "import runpy, sys; sys.argv = ['docs']; sys.path.insert(0, '.ci'); "
        "runpy.run_path('.ci/docs', run_name='__main__')"
    )
    assert written.returncode == 0, written.stderr
    row = "| `paceline.gateway.twins` | counter, twin | `side` | twins seen |"
    assert row in (checkout.root / "docs" / "metrics.md").read_text()


def test_a_new_sampling_parameter_changes_what_the_client_gets(checkout: Checkout) -> None:
    shutil.copytree(ROOT / "proto", checkout.root / "proto")
    checkout.change(PARAMETER)
    assert places(PARAMETER) <= 4
    generate_messages(checkout)
    with checkout.gateway("engine.workers=1") as (http, _):
        url = str(http.base_url)
        plain, biased = (checkout.python(GENERATE, url, value) for value in ("0", "900"))
        refused = checkout.python(GENERATE, url, "1001")
    assert biased.stdout.split() == ["9"] * 5, biased.stderr
    assert plain.stdout.split() != ["9"] * 5, plain.stderr
    assert "twin" in refused.stderr


@pytest.mark.slow
def test_a_new_release_of_sglang_is_taken_and_an_unknown_one_refused(checkout: Checkout) -> None:
    checkout.change(RELEASE)
    check = (
        "import sys; from paceline.services.rollout_gateway.engines.sglang import host; "
        "host.version = lambda name: sys.argv[1]; host.check_installed()"
    )
    assert checkout.python(check, "0.7.7").returncode == 0
    refused = checkout.python(check, "0.7.8")
    assert "release of SGLang is not supported; seen: 0.7.8; allowed: 0.7.7" in refused.stderr


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


def generate_messages(checkout: Checkout) -> None:
    """Does the work of `make proto` in the copy."""
    pytest.importorskip("grpc_tools")
    shutil.rmtree(checkout.root / "libs" / "paceline" / "v1")
    protos = sorted(str(path) for path in (checkout.root / "proto").rglob("*.proto"))
    out = [f"--{kind}_out=libs" for kind in ("python", "pyi", "grpc_python")]
    generate = "import sys; from grpc_tools.protoc import main; sys.exit(main(sys.argv))"
    made = checkout.python(generate, f"-I{checkout.root}/proto", *out, *protos)
    assert made.returncode == 0, made.stderr


def test_a_new_field_of_a_message_goes_over_the_wire(checkout: Checkout) -> None:
    shutil.copytree(ROOT / "proto", checkout.root / "proto")
    checkout.change(FIELD)
    assert places(FIELD) <= 2
    generate_messages(checkout)
    code = (
        "from paceline.v1.rollout_pb2 import SampleFinished as M\n"
        "assert M.FromString(M(twin_s=2.5).SerializeToString()).twin_s == 2.5"
    )
    done = checkout.python(code)
    assert done.returncode == 0, done.stderr
