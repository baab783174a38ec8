"""Users' rules in real child processes: their output, errors, return values and ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from rule_children import rule_pids

from paceline.errors import ConfigError, InvalidInput, NotFound, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.rules import RewardRules

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = """
import asyncio, os, subprocess, sys, time

class Length:
    def __init__(self):
        print("built")
        self.asked = 0
    def score(self, episode):
        print("printed", "x" * 100_000)
        os.write(1, b"written past Python")
        assert sys.stdin.read() == ""
        subprocess.run(["echo", "of another program"], check=True)
        self.asked += 1
        return len(episode.text) + self.asked / 10

class Later:
    def __init__(self):
        self.loop = None
    async def score(self, episode):
        await asyncio.sleep(0)
        same = self.loop in (None, asyncio.get_running_loop())
        self.loop = asyncio.get_running_loop()
        return float(same)

class Telling:
    def score(self, episode):
        m = episode.messages
        call = m[0].tool_calls[0]
        assert (call.name, call.arguments, m[0].reasoning, m[1].tool_call_id) == ("f", '{"a":  1}', "hm", "c1")
        return float(episode.task.metadata["level"]) if episode.task.answer == "6" else None

class Raises:
    def score(self, episode):
        raise KeyError("no such level")

class Quits:
    def score(self, episode):
        raise SystemExit("done")

class Dies:
    def score(self, episode):
        os._exit(1)

class DiesOnce:
    def score(self, episode):
        if not os.path.exists(episode.text):
            open(episode.text, "w").close()
            os._exit(1)
        return 1.0

class Hangs:
    def score(self, episode):
        child = subprocess.Popen(["sleep", "1000"])
        with open(episode.text, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)

class Pid:
    def score(self, episode):
        return float(os.getpid())

class Torch:
    def score(self, episode):
        return float("torch" in sys.modules or "transformers" in sys.modules)

class Garbles:
    def score(self, episode):
        for fd in range(3, 20):
            try:
                os.write(fd, b"\\xff" * 64)
            except OSError:
                pass
        return 1.0

class Says:
    def score(self, episode):
        return eval(episode.text)

class NoScore:
    pass

class NeedsArguments:
    def __init__(self, path):
        pass

def exits():
    sys.exit(3)
"""


def episode(text: str = "abc") -> Episode:
    return Episode(EpisodeTask("t", "p", "6", {"level": "2"}), text, "stop")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_rules.py"
    file.write_text(RULES)
    return file


def own(path: Path, **settings: float) -> RewardsConfig:
    """The file's classes as rules of their names."""
    names = re.findall(r"^(?:class|def) (\w+)", RULES, re.MULTILINE)
    classes = {name: f"{path}:{name}" for name in (*names, "Missing", "RULES")}
    return RewardsConfig(own=classes, **settings)


@pytest_asyncio.fixture(loop_scope="module")
async def rules(path: Path) -> AsyncIterator[RewardRules]:
    rules = RewardRules(own(path))
    yield rules
    await rules.stop()


async def impatient(
    path: Path, name: str, text: str, deadline_s: float
) -> tuple[float | None, set[int]]:
    """Return one score under a deadline, and the pids of the rules' processes after it."""
    before = rule_pids()
    rules = RewardRules(own(path, deadline_s=deadline_s))
    try:
        return await rules.rule(name).score(episode(text)), rule_pids() - before
    finally:
        await rules.stop()


async def test_a_rule_is_built_once_and_may_print_read_and_start_programs(
    rules: RewardRules, path: Path
) -> None:
    rule = rules.rule("Length")
    assert await rule.score(episode()) == 3.1
    assert await rule.score(episode("ab")) == 2.2


async def test_a_rule_sees_messages_metadata_and_answer(rules: RewardRules, path: Path) -> None:
    messages = (
        Message("assistant", "", "hm", (ToolCall("c1", "f", '{"a":  1}'),)),
        Message("tool", "ok", tool_call_id="c1"),
    )
    rule = rules.rule("Telling")
    task = EpisodeTask("t", "p", "6", {"level": "2"})
    assert await rule.score(Episode(task, "", "stop", messages)) == 2.0
    assert await rule.score(Episode(EpisodeTask("t", "p", ""), "", "stop", messages)) is None


async def test_coroutines_of_a_rule_share_one_event_loop(rules: RewardRules, path: Path) -> None:
    rule = rules.rule("Later")
    assert [await rule.score(episode()) for _ in range(2)] == [1.0, 1.0]


async def test_a_package_path_names_a_rule_and_loads_no_torch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = RewardRules(RewardsConfig(own={"torch": "own_rules:Torch"}))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(path.parent), os.environ.get("PYTHONPATH", "")])
    )
    await rules.check("torch")
    assert await rules.rule("torch").score(episode()) == 0.0
    await rules.stop()


@pytest.mark.parametrize(
    ("name", "why"), [("Raises", "no such level"), ("Quits", "SystemExit: done")]
)
async def test_a_rule_that_raises_leaves_the_sample_unscored_and_says_why(
    rules: RewardRules, path: Path, name: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = await rules.rule("Pid").score(episode())
    assert await rules.rule(name).score(episode()) is None
    shown = capfd.readouterr()
    assert why in shown.out + shown.err
    assert await rules.rule("Pid").score(episode()) == pid  # the same child still serves


async def test_a_rule_that_hangs_is_ended_with_what_it_started(path: Path, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    for deadline_s in (0.5, 5.0, 50.0):  # a busy machine may end it before it writes its pid
        value, pids = await impatient(path, "Hangs", str(told), deadline_s)
        assert value is None
        assert pids == set()
        if told.exists() and told.read_text():
            break
    assert gone(int(told.read_text()))


async def test_a_child_that_dies_is_replaced_once(
    rules: RewardRules, path: Path, tmp_path: Path
) -> None:
    assert await rules.rule("DiesOnce").score(episode(str(tmp_path / "died"))) == 1.0


@pytest.mark.parametrize("name", ["Dies", "Garbles"])
async def test_children_that_die_again_are_nobodys_zero(
    rules: RewardRules, path: Path, name: str
) -> None:
    with pytest.raises(Unavailable, match="child process of the rewards"):
        await rules.rule(name).score(episode())
    assert await rules.rule("Length").score(episode()) == 3.1


async def test_a_child_killed_while_idle_is_replaced(rules: RewardRules, path: Path) -> None:
    rule = rules.rule("Pid")
    first = await rule.score(episode())
    assert first is not None
    os.kill(int(first), signal.SIGKILL)
    assert await rule.score(episode()) != first


@pytest.mark.parametrize("text", ["float('nan')", "float('inf')", "-1e999"])
async def test_a_score_that_is_not_finite_is_refused_by_the_rules_name(
    rules: RewardRules, path: Path, text: str
) -> None:
    with pytest.raises(InvalidInput, match="rule Says"):
        await rules.rule("Says").score(episode(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("True", 1.0),
        ("None", None),
        ("__import__('numpy').float32(0.5)", 0.5),
        ("'1.0'", None),
        ("[1]", None),
        ("10**400", None),
    ],
)
async def test_a_score_is_a_number_or_none(
    rules: RewardRules, path: Path, text: str, value: float | None
) -> None:
    assert await rules.rule("Says").score(episode(text)) == value


async def test_children_are_spawned_when_they_are_needed_and_no_more(path: Path) -> None:
    before = rule_pids()
    rules = RewardRules(own(path, processes=2))
    rule = rules.rule("Pid")
    assert rule_pids() == before
    assert len({await rule.score(episode()) for _ in range(3)}) == 1
    assert len(rule_pids() - before) == 1
    used = set(await asyncio.gather(*(rule.score(episode()) for _ in range(8))))
    pids = rule_pids() - before
    assert len(used) == len(pids) == 2
    await rules.stop()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(Unavailable, match="stopped"):
        await rule.score(episode())


async def test_a_caller_that_goes_away_leaves_no_child_at_work(path: Path, tmp_path: Path) -> None:
    before = rule_pids()
    rules = RewardRules(own(path))
    await rules.check("Hangs")
    os.mkfifo(told := tmp_path / "pid")
    asked = asyncio.create_task(rules.rule("Hangs").score(episode(str(told))))
    started = int(await asyncio.to_thread(told.read_text))
    pids = rule_pids() - before
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert all(gone(pid) for pid in [*pids, started])
    assert await rules.rule("Length").score(episode()) == 3.1
    await rules.stop()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Missing", "Missing"),
        ("NoScore", "no method score"),
        ("NeedsArguments", "path"),
        ("exits", "SystemExit: 3"),
        ("RULES", "cannot be built"),
    ],
)
async def test_a_wrong_class_fails_the_check(
    rules: RewardRules, path: Path, name: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        await rules.check(name)


@pytest.mark.parametrize(
    "place", ["no_such_package.module:Rule", "no/such/file.py:Rule", "json:nothing", ".:x"]
)
async def test_a_wrong_place_fails_the_check(place: str) -> None:
    rules = RewardRules(RewardsConfig(own={"mine": place}))
    with pytest.raises(ConfigError, match="cannot be built"):
        await rules.check("mine")
    await rules.stop()


@pytest.mark.parametrize("name", ["luck", "", ":", "a:", ":b", "os:getcwd", "{path}:Length"])
async def test_a_rule_that_is_not_configured_is_refused_and_an_import_path_is_none(
    rules: RewardRules, path: Path, name: str
) -> None:
    before = rule_pids()
    with pytest.raises(NotFound, match=r"format, math_answer.*gateway\.rewards\.own"):
        await rules.check(name.format(path=path))
    assert rule_pids() == before


async def test_a_mended_class_passes_the_next_check(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    rules = RewardRules(RewardsConfig(own={"mended": f"{file}:Rule"}))
    file.write_text(
        "class Rule:\n    def score(self, episode):\n        return 1.0\nraise ValueError('too "
        "early')"
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match="too early"):
            await rules.check("mended")
    file.write_text(file.read_text().partition("raise")[0])
    await rules.check("mended")
    assert await rules.rule("mended").score(episode()) == 1.0
    await rules.stop()


async def test_a_reward_given_by_the_agent_stands(rules: RewardRules) -> None:
    given = Episode(EpisodeTask("t", "p", "6"), "#5", "stop", reward=0.25)
    assert await rules.rule("math_answer").score(given) == 0.25


def gone(pid: int) -> bool:
    """Return whether a process has ended, or is a zombie and about to end."""
    try:
        psutil.Process(pid).wait(timeout=patient(5))
    except psutil.NoSuchProcess:
        return True
    return not psutil.pid_exists(pid)
