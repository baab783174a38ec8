"""Code that is right, code that is wrong, and code that cheats."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from paceline.errors import ConfigError, Unavailable
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.code_tests import CodeTests, last_code_block
from paceline.services.rollout_gateway.sandbox import Sandbox

ADD_TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def rule() -> CodeTests:
    sandbox = Sandbox(SandboxConfig(wall_s=60, cpu_s=1))
    asyncio.run(sandbox.layers())
    return CodeTests(sandbox)


def episode(text: str, finish: str = "stop", **metadata: str) -> Episode:
    return Episode(EpisodeTask("t", "p", "", metadata), text, finish)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no block", "no block"),
        ("```python\na\n```", "a\n"),
        ("```\na\n```\ntext\n```py\nb\nc\n```\nmore", "b\nc\n"),
        ("~~~\na\n```\n~~~", "a\n```\n"),
        ("````\n```\ninner\n```\n````", "```\ninner\n```\n"),
        ("```python\na\n```\nthen ```python\nb", "a\n"),
        ("```a\n1\n```\n```python\ncut", "cut"),
        ("use ``` inline ``` here", "use ``` inline ``` here"),
        ("```\r\na\r\n```\r\n", "a\r\n"),
        ("", ""),
    ],
)
def test_the_last_fenced_block_is_the_code(text: str, code: str) -> None:
    assert last_code_block(text) == code


async def test_the_score_is_the_share_of_tests_passed(rule: CodeTests) -> None:
    assert await rule.score(episode(f"so\n```python\n{ADD}```\n", tests=ADD_TESTS)) == 1.0
    half = "def add(a, b):\n    return 3"
    assert await rule.score(episode(half, tests=ADD_TESTS)) == 0.5
    assert await rule.score(episode(half, tests=ADD_TESTS, scoring="all")) == 0.0
    assert await rule.score(episode(ADD, tests=ADD_TESTS, scoring="all")) == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        # as HumanEval writes them
        "def check(candidate):\n    assert candidate(1, b=2) == 3\ncheck(add)",
        "import math\nprint('x' * 100_000)\ndef test_add():\n    assert math.isclose(add(0.1, "
        "0.2), 0.3)",
        "for a in range(3):\n    assert add(a, a) == 2 * a",
        "assert add((1,), (2,)) == (1, 2)\nassert add([{1}], [None]) == [{1}, None]\nassert "
        "add(b'a', b'b') == b'ab'",
        "try:\n    add(1, '')\n    assert False\nexcept TypeError:\n    pass",
        "x = add(10**500, 1)\nassert x == 10**500 + 1\nassert add(1j, 1) == 1 + 1j\nassert "
        "add(float('inf'), 1) > 10",
    ],
)
async def test_tests_of_many_styles_pass(rule: CodeTests, tests: str) -> None:
    assert await rule.score(episode(ADD, tests=tests)) == 1.0


async def test_objects_generators_and_changed_arguments_are_seen_by_the_tests(
    rule: CodeTests,
) -> None:
    code = """
import math
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
class Solution:
    def solve(self, n): yield from range(n)
def sort(items): items.sort()
def fill(table): table["new"] = [1]
LIMIT = 7
"""
    tests = """
s = Stack()
s.push(3); s.push([4])
assert len(s) == 2 and s[0] == 3 and s.pop() == [4]
assert s.items == [3]
assert list(Solution().solve(3)) == [0, 1, 2]
assert Point(1, 2) == Point(1, 2) and Point(1, 2) != Point(1, 3)
assert Point(1, 2).x == 1 and str(Point(1, 2)) == "Point(x=1, y=2)"
items = [3, 1, 2]
sort(items)
assert items == [1, 2, 3]
table = {}
fill(table)
assert table == {"new": [1]}
assert LIMIT == 7 and math.sqrt(4) == 2
try:
    Stack().pop()
    assert False, "nothing was raised"
except IndexError:
    pass
"""
    assert await rule.score(episode(code, tests=tests)) == 1.0


CHEATS = {
    "prints what a harness might": "print('passed'); print('0'); print('1')",
    "exits well": "import os; os._exit(0)",
    "exits within a call": "import os\ndef add(a, b): os._exit(0)",
    "ends the loops of the tests": "def add(a, b): raise StopIteration",
    "raises SystemExit": "import sys\ndef add(a, b): sys.exit(0)",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    __ne__ = lambda self, other: False
    __hash__ = None
    __class__ = property(lambda self: int)
def add(a, b): return Any()""",
    "an int that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def add(a, b): return Any(99)""",
    "is ordered as one likes": """
class Any:
    def __getattr__(self, name): return lambda *a: self
    __sub__ = __abs__ = __rsub__ = lambda self, *a: self
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True
def add(a, b): return Any()""",
    "redefines builtins": """
import builtins
builtins.AssertionError = None
builtins.abs = lambda x: 0
builtins.compile = builtins.exec = lambda *a, **k: None
abs = lambda x: 0
def add(a, b): return 99""",
    "shadows a module": """
class math:
    isclose = lambda *a, **k: True
import sys; sys.modules["math"] = math
def add(a, b): return 99""",
    "looks for the tests": """
import gc, inspect, os, sys
def seek():
    found = []
    for frame in sys._current_frames().values():
        while frame:
            found.append(repr(frame.f_locals)); frame = frame.f_back
    found += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, str))]
    try: found.append(open(0).read())
    except Exception: pass
    for name in os.listdir("."):
        found.append(open(name).read())
    return "".join(found)
def add(a, b):
    if "add(" + "1, 2) == 3" in seek(): return a + b
    return 99""",
    "patches the harness it came from": """
import sys
main = sys.modules["__main__"]
for name in ("passed_tests", "pack", "unpack", "Wire", "TestSide", "Handle"):
    setattr(main, name, lambda *a, **k: True)
def add(a, b): return 99""",
    "answers with a broken message": """
import os, sys, gc
for o in gc.get_objects():
    if type(o).__name__ == "Wire":
        o._writer.write(b"\\xff\\xff\\xff\\xff"); o._writer.flush()
def add(a, b): return 99""",
    "writes to every descriptor": """
import os
for fd in range(0, 64):
    for line in (b"0\\n1\\n", b"passed\\n"):
        try: os.write(fd, line)
        except OSError: pass
def add(a, b): return 99""",
    "leaves modules for the tests to import": """
import os
for name in ("heapq", "math", "statistics", "random", "json"):
    with open(name + ".py", "w") as file:
        file.write("import builtins, sys\\n"
            "isclose = heappush = heappop = lambda *a, **k: True\\n"
            "builtins.abs = lambda x: 0\\n"
            "for frame in sys._current_frames().values():\\n"
            "    while frame:\\n"
            "        if 'passed' in frame.f_locals:\\n"
            "            for i in range(9): frame.f_locals['passed'](i)\\n"
            "        frame = frame.f_back\\n")
def add(a, b): return 99""",
    "traces the parent": """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
got = libc.ptrace(16, os.getppid(), 0, 0)
def add(a, b): return 3 * (got == 0) + 99
""",
    "kills the parent": "import os\ndef add(a, b): os.kill(os.getppid(), 9)",
    "forks in a call": "import os\ndef add(a, b):\n    os.fork()\n    return 99",
    "waits for ever": "def add(a, b):\n    while True: pass",
    "returns what cannot be passed": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "is not Python": "def add(a, b: return",
    "is empty": "",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
async def test_a_cheat_earns_nothing(rule: CodeTests, code: str) -> None:
    tests = (
        f"import heapq\nfrom statistics import mean\n{ADD_TESTS}assert abs(add(2, 2) - 4) < 1e-6\n"
    )
    tests += "assert all(map(lambda n: add(n, 1) == n + 1, range(3)))\n"
    tests += "assert math.isclose(add(2, 5), 7)\nassert add(9, 9) > 100\nassert 8 in [add(4, 4)]"
    assert await rule.score(episode(code, tests=tests)) == 0.0


async def test_a_name_of_python_means_pythons_own_unless_it_is_the_entry_point(
    rule: CodeTests,
) -> None:
    own = "def pow(a, b):\n    return a ** b\ndef select(a):\n    return a"
    tests = "assert pow(2, 3) == 8\nassert select(1) == 1"
    assert await rule.score(episode(own, tests=tests, entry_point="pow")) == 1.0
    assert await rule.score(episode(own.replace("**", "+"), tests=tests, entry_point="pow")) == 0.5
    assert await rule.score(episode("x = 1", tests=tests, entry_point="pow")) == 0.0


@pytest.mark.slow
async def test_what_passed_before_the_time_was_over_counts(rule: CodeTests) -> None:
    code = "def add(a, b):\n    while a < 0: pass\n    return a + b"
    assert await rule.score(episode(code, tests=ADD_TESTS)) == 0.5


@pytest.mark.slow
async def test_programs_are_judged_by_what_they_print(rule: CodeTests) -> None:
    cases = json.dumps([{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5", "stdout": "10"}])
    program = "print(sum(map(int, input().split())), ' ')\n"
    assert await rule.score(episode(program, cases=cases)) == 1.0
    assert await rule.score(episode("print(3)", cases=cases)) == 0.5
    assert await rule.score(episode("print(3)", cases=cases, scoring="all")) == 0.0
    assert await rule.score(episode("print(3)\n1/0", cases=cases)) == 0.0
    assert await rule.score(episode("while True: pass", cases=cases)) == 0.0
    assert await rule.score(episode(ADD, cases=cases, tests=ADD_TESTS)) == 0.5


async def test_a_cut_response_is_scored_by_the_code_it_holds(rule: CodeTests) -> None:
    whole = f"```python\n{ADD}```\nand so"
    assert await rule.score(episode(whole, "length", tests=ADD_TESTS)) == 1.0
    assert (
        await rule.score(
            episode("```python\ndef add(a, b):\n    return (a", "length", tests=ADD_TESTS)
        )
        == 0.0
    )
    assert await rule.score(episode(whole, "error", tests=ADD_TESTS)) is None


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"tests": "x = 1"},
        {"tests": "assert ("},
        {"cases": "{}"},
        {"cases": "[1]"},
        {"cases": "nonsense"},
        {"cases": "[]"},
        {"tests": ADD_TESTS, "scoring": "most"},
    ],
)
async def test_a_task_without_usable_tests_leaves_the_sample_unscored(
    rule: CodeTests, metadata: dict[str, str]
) -> None:
    assert await rule.score(episode(ADD, **metadata)) is None


async def test_a_sandbox_that_cannot_start_is_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(Unavailable, match="no directory could be made"):
        await CodeTests(Sandbox(SandboxConfig())).score(episode(ADD, tests=ADD_TESTS))


async def test_more_tests_than_can_be_reported_leave_the_sample_unscored() -> None:
    narrow = CodeTests(Sandbox(SandboxConfig(output_bytes=1024)))
    assert await narrow.score(episode(ADD, tests="assert add(1, 2) == 3\n" * 31)) == 1.0
    assert await narrow.score(episode(ADD, tests="assert add(1, 2) == 3\n" * 32)) is None


def test_tests_and_code_need_a_process_each() -> None:
    with pytest.raises(ConfigError, match="processes"):
        CodeTests(Sandbox(SandboxConfig(processes=1)))
