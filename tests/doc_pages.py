"""Reads the code blocks of README and docs, and executes the blocks of a page as its reader would.

A block is a fence with a language. An HTML comment right above it may name the way to run it:

    <!-- file: NAME -->               its text is written to this file
    <!-- background until: TEXT -->   its command runs until the page's end; TEXT shows that it is ready
    <!-- run by: tests/PATH ... -->   that test runs it
    <!-- computed by: .ci/PATH ... -->  that program writes the block from the code, and .ci/check compares
    <!-- planned: REASON -->          its run takes too long: `plan_run` checks its settings and files instead
    <!-- not run: REASON -->          nothing runs it

A console block has its commands behind `$ `; the lines below a command are its output.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from paceline.local.patience import patient

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!R]*.md"))]
"""README and the pages of docs/; the index docs/README.md has no code."""
MARK = re.compile(
    r"<!-- (?P<how>file|background until|run by|computed by|planned|not run): (?P<what>\S.*?) -->",
    re.DOTALL,
)
WHOLE_RUN = re.compile(
    r"paceline (?P<kind>up|demo)(?P<settings>( --config \S+| [\w.]+=\S+)+)( +#.*)?"
)
DEMO = "examples/demo/demo.toml"
COMMAND_S = patient(60)
CLI = "paceline.cli.main"
CHECKED = """import json, pathlib, sys
from paceline.cli.plan import plan_run
plan_run([*map(pathlib.Path, json.loads(sys.argv[1]))], json.loads(sys.argv[2]))
"""


@dataclass(frozen=True)
class Block:
    """One piece of code of a page."""

    page: Path
    line: int
    language: str  # empty: an indented block
    text: str
    how: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def plans(self) -> list[list[str]]:
        """Commands that check the runs that a block starts."""
        found: list[list[str]] = []
        for command, _ in self.commands():
            run = WHOLE_RUN.fullmatch(command)
            assert run is not None, f"{self}: no run of settings alone: $ {command}"
            words = run["settings"].split()
            files = [word for word in words if word != "--config" and "=" not in word]
            files += [DEMO] if run["kind"] == "demo" else []
            settings = [word for word in words if "=" in word]
            found.append([sys.executable, "-c", CHECKED, json.dumps(files), json.dumps(settings)])
        return found

    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands of a console block, each with its expected output lines."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line:
                assert found, f"{self}: a console block begins with a command: $ ..."
                found[-1][1].append(line)
        return found


def blocks_of(page: Path) -> list[Block]:
    """Every code block of a page, in its order."""
    found: list[Block] = []
    mark: re.Match[str] | None = None
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type == "html_block":
            mark = MARK.fullmatch(token.content.strip())
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            how, what = (mark["how"], mark["what"]) if mark else ("", "")
            language = token.info.strip()
            found.append(Block(page, token.map[0] + 1, language, token.content, how, what))
            mark = None
        elif token.level == 0:
            mark = None
    return found


class Reader:
    """Executes the blocks of a page in a folder, one after the other."""

    def __init__(self, folder: Path, said: Callable[[str], str], stack: ExitStack) -> None:
        """`said`: the text that the reader types for a text of the page, e.g. with a free port."""
        self.folder = folder
        self.logs: list[Path] = []
        self._said = said
        self._stack = stack
        own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Uses this checkout's command, whatever is installed.
        (own / "paceline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {CLI} "$@"\n')
        (own / "paceline").chmod(0o700)
        binaries = f"{own}{os.pathsep}{Path(sys.executable).parent}"
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "PACELINE": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def play(self, block: Block, timeout_s: float = COMMAND_S) -> None:
        """Fails if a command or a program fails, or if its output differs from the page."""
        text = self._said(block.text)
        match block.how, block.language:
            case ("not run" | "run by" | "computed by", _) | ("", "text"):
                return
            case "planned", "console":
                for plan in block.plans():
                    self._run(block, [self._said(word) for word in plan], timeout_s)
            case "file", _:
                (self.folder / block.what).write_text(text)
            case "background until", "console":
                ((command, _),) = block.commands()
                self._begin(block, self._said(command))
            case "", "console":
                for command, printed in block.commands():
                    out = self._run(block, ["bash", "-c", self._said(command)], timeout_s)
                    if printed:
                        lines = [line.rstrip() for line in out.splitlines()]
                        assert lines == printed, f"{block}: $ {command}\n{out}"
            case "", "python":
                self._run(block, [sys.executable, "-c", text], timeout_s)
            case _:
                pytest.fail(f"{block}: nobody knows how to run {block.language!r}; mark it")

    def _run(self, block: Block, command: list[str], timeout_s: float) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        logs = "".join(log.read_text()[-4000:] for log in self.logs)
        assert done.returncode == 0, f"{block}: {command}\n{done.stdout}{done.stderr}\n{logs}"
        return done.stdout

    def _begin(self, block: Block, command: str) -> None:
        log = self.folder / f"terminal-{len(self.logs)}.log"
        self.logs.append(log)
        process = self._stack.enter_context(_terminal(command, self.folder, self._environment, log))
        deadline = time.monotonic() + COMMAND_S
        while block.what not in log.read_text():
            over = process.poll() is not None or time.monotonic() > deadline
            assert not over, f"{block}: never {block.what!r}\n{log.read_text()}"
            time.sleep(0.05)


@contextmanager
def reader(folder: Path, said: Callable[[str], str]) -> Iterator[Reader]:
    """A reader with terminals that close at the end of the block."""
    with ExitStack() as stack:
        yield Reader(folder, said, stack)


@contextmanager
def _terminal(
    command: str, folder: Path, environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs beside the next commands, ended by Ctrl-C."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=patient(60))
        finally:
            process.kill()
