"""A test runs every code block of README and docs, or a note above the block gives a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, Block, blocks_of, reader

from paceline.config.load import load_config
from paceline.local.services import SERVICES
from paceline.plugins import import_object

PLAYED = {"README.md", "agents.md", "tutorial.md"}
"""Pages with blocks that follow from each other; tests/integration/test_pages.py plays them."""
MADE = {"machine": "a drawing in a docstring", "cli": "usage lines"}
"""Pages of .ci/docs with indented blocks that no test runs, by their names without .md."""
NO_CODE = ("text", "mermaid")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named_file(block: Block) -> str:
    """The file that a comment names first."""
    return block.what.split()[0].rstrip(",;")


def run_alone(block: Block, folder: Path) -> None:
    """Runs a block of a page with independent blocks, from the root of the checkout."""
    match block.language:
        case "toml":
            settings_are_taken(block, folder)
        case "json":
            json.loads(block.text)
        case _:
            with reader(ROOT, str) as one:
                one.play(block)


def settings_are_taken(block: Block, folder: Path) -> None:
    """Every service takes its part of the settings."""
    file = folder / "run.toml"
    file.write_text(block.text)
    tasks = ['coordinator.tasks_path="tasks.jsonl"']
    for spec in SERVICES:
        if spec.settings:
            load_config(import_object(spec.settings), spec.name, [file], tasks)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_or_says_why_not(block: Block, tmp_path: Path) -> None:
    if block.page.stem in MADE and not block.language:
        return
    assert block.language, f"{block}: an indented block has no language; write a fence"
    match block.how:
        case "not run":
            assert len(block.what.split()) >= 3, f"{block}: a reason in words"
        case "run by":
            test = ROOT / named_file(block)
            assert test.is_file(), f"{block}: {test} does not exist"
            assert re.search(r"\bPAGE\b|docs", test.read_text()), f"{block}: {test} reads no page"
        case "computed by":
            assert (ROOT / named_file(block)).is_file(), f"{block}: who computes it?"
            assert "make docs" in block.page.read_text(), f"{block}: no page of .ci/docs"
        case "planned" if block.page.name not in PLAYED:
            assert len(block.what.split()) >= 3, f"{block}: a reason in words"
            run_alone(block, tmp_path)
        case _ if block.language not in NO_CODE and block.page.name not in PLAYED:
            assert not block.how, f"{block}: only a page that is played has files and terminals"
            run_alone(block, tmp_path)


def test_the_pages_that_are_played_exist_and_have_commands() -> None:
    played = [page for page in PAGES if page.name in PLAYED]
    assert len(played) == len(PLAYED)
    for page in played:
        assert any(block.language == "console" for block in blocks_of(page))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("```rust\nfn\n```\n", "nobody knows how to run 'rust'"),
        ("```console\n$ false\n```\n", "'false'"),
        ("```console\n$ echo one\ntwo\n```\n", r"\$ echo one"),
        ("```console\necho one\n```\n", "begins with a command"),
        ("```python\nassert 1 == 2\n```\n", "AssertionError"),
        ("<!-- planned: takes too long -->\n```console\n$ paceline up\n```\n", "settings alone"),
        ("<!-- planned: takes too long -->\n```console\n$ paceline up --config a\n```\n", "'a'"),
        ("<!-- background until: ready -->\n```console\n$ false\n```\n", "never 'ready'"),
    ],
)
def test_a_block_that_does_not_do_what_it_says_fails(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doc_pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(source)
    (block,) = blocks_of(page)
    failure = (AssertionError, pytest.fail.Exception)
    with reader(tmp_path, str) as one, pytest.raises(failure, match=says):
        one.play(block)


def test_a_mark_counts_for_the_block_right_below_it_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: for a reason -->\n\n```console\n$ a\n```\n\n```json\n1\n```\n")
    assert [block.how for block in blocks_of(page)] == ["not run", ""]
    page.write_text("<!-- not run: for a reason -->\n\nBetween.\n\n```json\n1\n```\n")
    assert [block.how for block in blocks_of(page)] == [""]
