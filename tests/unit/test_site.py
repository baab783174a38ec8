"""The docs site: its nav, its links, its generated references."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from google.protobuf.descriptor import Descriptor

from paceline.cli import main
from paceline.local.patience import patient

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The hook of mkdocs.yml."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci/site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_nav_names_every_page_that_is_there_or_made_and_no_other(pages: ModuleType) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    made = {*pages.FROM_ROOT.values(), pages.DECISIONS}
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {pages.INDEX}
    assert set(pages.pages_of(nav)) == made | there
    assert {"cli.md", "settings.md", "metrics.md", "protos.md", "streams.md"} <= there
    assert all((ROOT / name).is_file() for name in pages.FROM_ROOT)


def test_the_nav_leaves_an_absent_tutorial_out_and_takes_an_unnamed_page_in(
    pages: ModuleType,
) -> None:
    nav = ["index.md", {"Start": [{"Tutorial": "tutorial.md"}, "a.md"]}]
    assert pages.complete_nav(nav, ["a.md", "new.md"]) == [
        "index.md",
        {"Start": ["a.md"]},
        {"More": ["new.md"]},
    ]
    there = pages.complete_nav(nav, ["a.md", "tutorial.md"])
    assert there == nav


@pytest.mark.parametrize(
    ("target", "origin", "uri", "leads_to"),
    [
        ("docs/agents.md#keys", "README.md", "index.md", "agents.md#keys"),
        ("docs/paceline.svg", "README.md", "index.md", "paceline.svg"),
        ("docs/adr", "README.md", "index.md", "adr/index.md"),
        ("CONTRIBUTING.md", "README.md", "index.md", "contributing.md"),
        ("examples/tool_agent", "README.md", "index.md", None),
        ("../README.md", "docs/agents.md", "agents.md", "index.md"),
        ("../../ARCHITECTURE.md", "docs/adr/0001-x.md", "adr/0001-x.md", "../architecture.md"),
        ("adr/0001-x.md", "docs/agents.md", "agents.md", "adr/0001-x.md"),
        ("../proto/a.proto", "docs/agents.md", "agents.md", None),
        ("https://arxiv.org/abs/1", "README.md", "index.md", "https://arxiv.org/abs/1"),
        ("#here", "docs/agents.md", "agents.md", "#here"),
    ],
)
def test_a_link_leads_to_its_page_or_becomes_its_words(
    pages: ModuleType, target: str, origin: str, uri: str, leads_to: str | None
) -> None:
    known = {"index.md", "agents.md", "contributing.md", "architecture.md", "paceline.svg"}
    known |= {"adr/index.md", "adr/0001-x.md"}
    assert pages.target_on_site(target, origin, uri, known) == leads_to


def test_links_in_code_are_left_as_they_are(pages: ModuleType) -> None:
    text = "[a](b) and ![c](d)\n```\nx[0](y)\n```\n[e](f)\n"
    found = {"b": None, "d": "D", "f": "F"}
    assert pages.with_links(text, found.get) == "a and ![c](D)\n```\nx[0](y)\n```\n[e](F)\n"


def test_the_list_of_decisions_has_every_record_once(pages: ModuleType) -> None:
    listed = pages.decisions_page()
    for path in (ROOT / "docs/adr").glob("*.md"):
        assert listed.count(f"({path.name})") == 1


def test_the_reference_of_the_wire_has_every_field_of_every_message() -> None:
    page = (ROOT / "docs/protos.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n### ")[1:])
    for path in (ROOT / "proto/paceline/v1").glob("*.proto"):
        file = import_module(f"paceline.v1.{path.stem}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            calls = sections[f"service {service.name}"]
            assert all(f"| `{call.name}` |" in calls for call in service.methods)
        for message in file.message_types_by_name.values():
            assert_listed(message, message.name, sections)


def assert_listed(message: Descriptor, name: str, sections: dict[str, str]) -> None:
    for field in message.fields:
        (row,) = [
            line for line in sections[name].splitlines() if line.startswith(f"| `{field.name}` |")
        ]
        number, kind, meaning = (cell.strip() for cell in row.strip("|").split(" | ")[1:4])
        assert number == str(field.number)
        assert meaning, f"{name}.{field.name}"
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            assert field.message_type.name in kind
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            assert_listed(nested, f"{name}.{nested.name}", sections)


def test_the_reference_of_the_commands_has_every_option_of_a_command() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    (demo,) = [part for part in page.split("\n## ") if part.startswith("paceline demo\n")]
    names = set(inspect.signature(main.demo).parameters) - {"overrides"}
    for name in names:
        assert re.search(rf"^\| [`<code>]+--{name.replace('_', '-')}\b", demo, re.MULTILINE)
    assert "| `--steps INT` | `80` | RL steps |" in demo
    assert "    paceline demo [OPTIONS] [KEY=VALUE]...\n" in demo


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr
    for page in ("index", "installing", "settings", "protos", "cli", "adr/index", "changelog"):
        assert (tmp_path / f"{page}.html").is_file()
    home = (tmp_path / "index.html").read_text()
    assert 'href="agents.html"' in home
    assert 'src="paceline.svg"' in home
