"""Scores a response's code by its task's tests: finds the code, runs it in the sandbox and counts
passed tests.

metadata["tests"] is Python source that uses the code's definitions. metadata["cases"] is a JSON
list of {"stdin", "stdout"}, for code that is a program. A task may have both. metadata["scoring"]
is "share" (of passed tests and cases, the default) or "all" (1.0 when every test and case passed,
else 0.0). In tests, names of builtins and of standard modules keep their meaning, even if the code
redefines them. metadata["entry_point"] is the name that the code has to define.

Code earns nothing by printing or exiting its way out, or by returning an object that equals or
exceeds everything. It cannot redefine assert, builtins or modules for the tests. It cannot read the
tests or the expected outputs, or reach the report. Expected outputs never enter the sandbox. Tests
run there in their own process (code_harness.py) and report under a word that the code's process
never holds.

These tricks remain possible: the code answers from memory, or guesses from the arguments; it
distinguishes tests by their arguments and their order; it decides whether two objects of its own
classes are equal, if a test compares them; it empties a list argument, if the test later compares
with that list.

Tests have limits: they cannot pass functions to the code, use its classes in isinstance or as base
classes, or add or order objects of the code's classes. unittest's classes are not run.
"""

import ast
import itertools
import json
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from paceline.errors import ConfigError, Unavailable
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards import RewardRule
from paceline.services.rollout_gateway.rewards.code_harness import CANDIDATE_FILE, READY
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.telemetry import get_logger

log = get_logger(__name__)
_HARNESS = Path(__file__).with_name("code_harness.py")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_REPORT_BYTES = 32  # bytes of one passed test's report, rounded up
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_PREPARATIONS = (*_DEFINITIONS, *_ASSIGNMENTS, ast.Import, ast.ImportFrom, ast.Pass)
_SCORINGS = ("share", "all")


class _Case(BaseModel):
    """One run of a program."""

    stdin: str = ""
    stdout: str


_CASES: TypeAdapter[tuple[_Case, ...]] = TypeAdapter(tuple[_Case, ...])


@dataclass(frozen=True, slots=True)
class _Statement:
    """One top-level statement of the tests."""

    source: str
    test: int | None  # the test's number, counted from 0; None: no test
    function: str  # to call afterwards; empty: none


@dataclass(frozen=True, slots=True)
class _Asked:
    """A task's requirements for code."""

    statements: tuple[_Statement, ...]  # of the tests, in order
    modules: tuple[str, ...]  # standard modules that the statements use
    entry_point: str  # a name that the code has to define; empty: none
    cases: tuple[_Case, ...]
    scoring: str

    @property
    def test_count(self) -> int:
        return sum(statement.test is not None for statement in self.statements)


class CodeTests(RewardRule):
    """Share of the tests that the response's last fenced code block passes. Without a block, the
    whole text is the code.

    A response cut by its length is scored like any other: a complete block still counts, a cut
    block will rarely run. A task with unreadable tests or without tests leaves the sample unscored.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        """Raises ConfigError when the sandbox allows a single process, since tests and code need
        one process each.
        """
        if (processes := sandbox.config.processes) < 2:
            raise ConfigError("rewards.sandbox.processes", seen=processes, allowed="2 or more")
        self._sandbox = sandbox
        self._harness = _HARNESS.read_text(encoding="utf-8")

    async def prepare(self) -> None:
        """Raises ConfigError when the sandbox cannot isolate code as configured."""
        await self._sandbox.layers()

    async def score(self, episode: Episode) -> float | None:
        """Raises Unavailable when the sandbox fails."""
        if episode.finish in ("abort", "error"):
            return None
        try:
            asked = _asked(episode.task)
            room = self._sandbox.config.output_bytes // _REPORT_BYTES - 1
            if asked.test_count > room:
                limit = "rewards.sandbox.output_bytes"
                raise ValueError(f"{asked.test_count} tests, not {room} ({limit})")
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            # Python's parsers raise the last two for deep nesting.
            log.warning("unusable tests", task=episode.task.task_id, error=repr(error))
            return None
        code = last_code_block(episode.text)
        passed = await self._tests_passed(code, asked) + await self._cases_passed(code, asked)
        total = asked.test_count + len(asked.cases)
        return float(passed == total) if asked.scoring == "all" else passed / total

    async def _tests_passed(self, code: str, asked: _Asked) -> int:
        if not asked.test_count:
            return 0
        nonce = secrets.token_hex(8)
        orders = {"nonce": nonce, **asdict(asked)}
        del orders["cases"]  # expected outputs never enter the sandbox
        stdin = json.dumps(orders)
        result = await self._sandbox.run(self._harness, stdin=stdin, files={CANDIDATE_FILE: code})
        if not result.stdout.startswith(f"{READY}\n"):
            seen = f"{result.reason}: {result.stderr[-300:]}"
            raise Unavailable("the process of the tests did not start", seen=seen)
        reported = {line for line in result.stdout.splitlines() if line.startswith(f"{nonce} ")}
        return sum(f"{nonce} {number}" in reported for number in range(asked.test_count))

    async def _cases_passed(self, code: str, asked: _Asked) -> int:
        """Run the cases in order. The first case that times out ends the run, since later cases
        would time out too.
        """
        passed = 0
        for case in asked.cases:
            result = await self._sandbox.run(code, stdin=case.stdin)
            if result.reason in ("timeout", "cpu"):
                break
            ended = result.reason == "exit" and result.exit_code == 0 and not result.truncated
            right = ended and _lines(result.stdout) == _lines(case.stdout)
            passed += right
            if asked.scoring == "all" and not right:
                break
        return passed


def last_code_block(text: str) -> str:
    """Content of the last fenced block (``` or ~~~), closed or not; the whole text without any
    block.
    """
    fence, block, last = "", list[str](), None
    for line in text.splitlines(keepends=True):
        mark = _FENCE.fullmatch(line.rstrip("\r\n"))
        if fence and mark and mark[1].startswith(fence) and not mark[2].strip():
            fence, last = "", "".join(block)
        elif fence:
            block.append(line)
        elif mark and "`" not in mark[2]:
            fence, block = mark[1], []
    if fence:
        return "".join(block)
    return text if last is None else last


def _lines(output: str) -> Sequence[str]:
    """Lines without the space at line ends and the empty lines at the end, which judges of programs
    ignore.
    """
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _asked(task: EpisodeTask) -> _Asked:
    """Raises ValueError, SyntaxError, RecursionError or MemoryError."""
    metadata: Mapping[str, str] = task.metadata
    scoring, entry_point = metadata.get("scoring", "share"), metadata.get("entry_point", "")
    if scoring not in _SCORINGS:
        raise ValueError(f'metadata["scoring"] is {scoring!r}, not one of {", ".join(_SCORINGS)}')
    cases = _CASES.validate_json(metadata.get("cases") or "[]")
    tree = ast.parse(metadata.get("tests", ""))
    asked = _Asked(_statements(tree), _modules(tree, entry_point), entry_point, cases, scoring)
    if not asked.test_count and not cases:
        raise ValueError('neither metadata["tests"] nor metadata["cases"] holds a test')
    return asked


def _statements(tree: ast.Module) -> tuple[_Statement, ...]:
    """Split the tests into statements.

    A test is a function `test...` without arguments, or a top-level statement that is no
    definition, import or assignment: an assert, a call, a loop over cases.
    """
    numbers = itertools.count()
    found = []
    for statement in tree.body:
        function = _test_function(statement)
        number = next(numbers) if function or _is_bare_test(statement) else None
        found.append(_Statement(ast.unparse(statement), number, function))
    return tuple(found)


def _test_function(statement: ast.stmt) -> str:
    """Name of a test function; empty for any other statement."""
    if not isinstance(statement, ast.FunctionDef) or not statement.name.startswith("test"):
        return ""
    return statement.name if len(statement.args.args) == len(statement.args.defaults) else ""


def _is_bare_test(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return False
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, _PREPARATIONS)


def _modules(tree: ast.Module, entry_point: str) -> tuple[str, ...]:
    """Standard modules with members that the tests use. Tests may rely on the code's imports, but
    the code must not replace these modules.
    """
    owners = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    bases = {owner.id for owner in owners if isinstance(owner, ast.Name)}
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    stored = {node.id for node in named if isinstance(node.ctx, ast.Store)}
    return tuple(sorted((bases - stored - {entry_point}) & sys.stdlib_module_names))
