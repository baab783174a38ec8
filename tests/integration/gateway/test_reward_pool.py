"""Rewards and code of models on the slots of a real Ray cluster: the same scores, what is lost, what
is called off, and what is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from ray_nodes import WITH_RAY
from reward_pools import HANGS_ONCE, RUN, actors, gone, joined_slots, ray_head, written

from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import RewardsConfig, SandboxConfig
from paceline.services.rollout_gateway.environments.base import Episode, EpisodeTask
from paceline.services.rollout_gateway.reward_pool.pool import RewardPool
from paceline.services.rollout_gateway.reward_pool.sandbox import PooledSandbox
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.services.rollout_gateway.sandbox import Sandbox

pytestmark = [
    WITH_RAY,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
SLOTS = 2
RULES = """
import os, signal, subprocess, time

class Length:
    def score(self, episode):
        return float(len(episode.text))

class Hangs:
    def score(self, episode):
        with open(episode.text, "w") as file:
            file.write(f"{os.getpid()} {subprocess.Popen(['sleep', '1000']).pid}\\n")
        time.sleep(1000)

class Environment:
    def score(self, episode):
        return float(any(name.startswith("RAY_") for name in os.environ))
"""
SLEEP = """
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(99)", {word!r}])
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_head(str(SLOTS), f"{RUN}/reward") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(address: str) -> AsyncIterator[RewardPool]:
    async with joined_slots(address, SLOTS, wall_s=60) as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_rules.py"
    file.write_text(RULES + HANGS_ONCE)
    return file


def rules_there(path: Path, pool: RewardPool, **settings: float) -> RewardRules:
    names = ("Length", "HangsOnce", "Hangs", "Environment")
    config = RewardsConfig(own={name: f"{path}:{name}" for name in names}, **settings)
    sandbox = PooledSandbox(config.sandbox, pool.slots)
    return RewardRules(config, sandbox, [slot.spawn for slot in pool.slots])


def episode(text: str, **metadata: str) -> Episode:
    return Episode(EpisodeTask("t", "p", "0.5", metadata), text, "stop")


def bearers(word: str) -> list[psutil.Process]:
    """Processes with the word as their last argument."""
    return [one for one in psutil.process_iter(["cmdline"]) if word in (one.info["cmdline"] or ())]


async def begun(word: str, still: asyncio.Task[Any]) -> list[psutil.Process]:
    """Those of a program that has begun; the deadline is the test's."""
    while not (found := bearers(word)):
        assert not still.done(), still.result()
        await asyncio.sleep(0.02)
    return found


async def test_scores_are_those_of_rules_beside_the_gateway(path: Path, pool: RewardPool) -> None:
    asked = [
        ("Length", episode("abc")),
        ("math_answer", episode("so it is #\\frac{1}{2}")),
        ("math_answer", episode("so it is #\\sqrt{2}")),
        ("code_tests", episode("def f(x): return x + 1", tests="assert f(1) == 2")),
        ("code_tests", episode("def f(x): return 3", tests="assert f(1) == 2\nassert f(2) == 3")),
        ("code_tests", episode("print(input())", cases='[{"stdin": "7", "stdout": "7"}]')),
    ]
    there = rules_there(path, pool)
    here = RewardRules(RewardsConfig(own={"Length": f"{path}:Length"}))
    try:
        found = [
            await asyncio.gather(*(rules.rule(name).score(one) for name, one in asked))
            for rules in (there, here)
        ]
        assert found[0] == found[1] == [3.0, 1.0, 0.0, 1.0, 0.5, 1.0]
        parents = {psutil.Process(pid).ppid() for pid in there.pids}
        assert parents <= {actor.pid for actor in actors()}
    finally:
        await there.stop()
        await here.stop()


async def test_a_rule_sees_nothing_that_lets_in_to_the_cluster(
    path: Path, pool: RewardPool
) -> None:
    rules = rules_there(path, pool)
    assert await rules.rule("Environment").score(episode("")) == 0.0
    await rules.stop()


@pytest.mark.parametrize("victim", ["child", "actor"])
async def test_what_a_lost_process_was_scoring_is_scored_once_more(
    victim: str, path: Path, pool: RewardPool, tmp_path: Path
) -> None:
    rules = rules_there(path, pool)
    told = tmp_path / "told"
    asked = asyncio.create_task(rules.rule("HangsOnce").score(episode(str(told))))
    child, actor = await written(told, asked)
    os.kill({"child": child, "actor": actor}[victim], signal.SIGKILL)
    assert await asked == 1.0
    lives = [line.split() for line in told.read_text().splitlines()]
    assert len(lives) == 2
    assert (lives[0][1] == lives[1][1]) == (victim == "child")
    assert gone(child)
    await rules.stop()


async def test_a_program_of_a_lost_actor_is_run_once_more(pool: RewardPool) -> None:
    sandbox, word = PooledSandbox(SandboxConfig(wall_s=60), pool.slots), uuid.uuid4().hex
    asked = asyncio.create_task(sandbox.run(SLEEP.format(word=word)))
    first = await begun(word, asked)
    (actor,) = {one.pid for one in first[0].parents()} & {one.pid for one in actors()}
    os.kill(actor, signal.SIGKILL)
    assert all(gone(one.pid) for one in first)
    assert {one.pid for one in await begun(word, asked)}.isdisjoint(one.pid for one in first)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert bearers(word) == []


async def test_a_score_that_takes_too_long_is_ended_on_its_node(
    path: Path, pool: RewardPool, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    for deadline_s in (0.5, 5.0, 50.0):  # on a busy machine it may be ended before it has said so
        rules = rules_there(path, pool, deadline_s=deadline_s)
        await rules.check("Hangs")
        before = {actor.pid for actor in actors()}
        assert await rules.rule("Hangs").score(episode(str(told))) is None
        await rules.stop()
        if told.exists() and told.read_text():
            break
    assert all(gone(int(pid)) for pid in told.read_text().split())
    assert before <= {actor.pid for actor in actors()}  # they score on
    rules = rules_there(path, pool)
    assert await rules.rule("Length").score(episode("ab")) == 2.0
    await rules.stop()


async def test_a_caller_that_goes_away_leaves_nothing_at_work(
    path: Path, pool: RewardPool, tmp_path: Path
) -> None:
    rules = rules_there(path, pool)
    scored, word = tmp_path / "scored", uuid.uuid4().hex
    asked = asyncio.create_task(rules.rule("Hangs").score(episode(str(scored))))
    sandbox = PooledSandbox(SandboxConfig(), pool.slots)
    run = asyncio.create_task(sandbox.run(SLEEP.format(word=word)))
    pids = [*await written(scored, asked), *(one.pid for one in await begun(word, run))]
    for one in (asked, run):
        one.cancel()
    await asyncio.gather(asked, run, return_exceptions=True)
    assert all(gone(pid) for pid in pids)
    assert await rules.rule("Length").score(episode("ab")) == 2.0
    await rules.stop()


async def test_each_node_has_the_walls_of_one_beside_the_gateway(pool: RewardPool) -> None:
    there = await PooledSandbox(SandboxConfig(), pool.slots).layers()
    assert there == await Sandbox(SandboxConfig()).layers()


GATEWAY = """
import asyncio, sys
from reward_pools import joined_slots
from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.environments.base import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.rules import RewardRules
async def main():
    async with joined_slots({address!r}, {slots}) as pool:
        spawns = [slot.spawn for slot in pool.slots]
        rules = RewardRules(RewardsConfig(own={{"Hangs": "{path}:Hangs"}}), spawns=spawns)
        one = Episode(EpisodeTask("t", "p", "6"), {told!r}, "stop")
        asked = asyncio.create_task(rules.rule("Hangs").score(one))
        await asyncio.to_thread(sys.stdin.readline)
        assert not asked.done()
asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["stopped", "killed"])
async def test_a_gateway_leaves_no_actor_and_no_child_however_it_ends(
    end: str, address: str, path: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    program = GATEWAY.format(address=address, slots=SLOTS, path=path, told=str(told))
    places = os.pathsep.join(sys.path)
    gateway = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": places},
    )
    running = asyncio.create_task(gateway.wait())
    child, started = await written(told, running)
    actor = psutil.Process(child).ppid()
    assert actor in {one.pid for one in actors()}
    if end == "killed":
        gateway.kill()
    else:
        assert gateway.stdin is not None
        gateway.stdin.close()
    assert await running == (-signal.SIGKILL if end == "killed" else 0)
    assert gone(child)
    assert gone(actor)
    if end == "stopped":
        assert gone(started)
    else:  # nobody was left to end what a rule had started
        os.kill(started, signal.SIGKILL)


async def test_a_pool_that_nobody_has_reserved_is_refused(address: str) -> None:
    program = f"""
import asyncio
import reward_pools
reward_pools.RUN = "another"
async def main():
    async with reward_pools.joined_slots({address!r}, 1):
        pass
asyncio.run(main())
"""
    places = os.pathsep.join(sys.path)
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": places},
        timeout=patient(60),
    )
    assert ended.returncode != 0
    assert "the pool of rewards is not reserved; seen: another/reward" in ended.stderr
