"""Text from outside is shown literally, brackets included."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.live import event_line
from paceline.cli.main import app
from paceline.local.launch import ChildEvent

HOSTILE = (
    "/data/[/runs]/x",
    "list[int]",
    "[bold red]",
    "[link=https://page.example]here[/link]",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_end_of_a_childs_log_is_shown_as_it_is(text: str) -> None:
    output = StringIO()
    event = ChildEvent("gateway", "died", 7, f"exit 1: {text}")
    Console(file=output, width=200).print(event_line(event), highlight=False)
    assert output.getvalue() == f"gateway died: exit 1: {text} (pid 7)\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_is_reported_with_its_text_as_it_is(text: str) -> None:
    done = CliRunner().invoke(app, ["up", f"run.dir={text}", "run.seed=-1", f"no.{text}=1"])
    assert done.exit_code == 2
    assert text in done.output.replace("\n", "")
