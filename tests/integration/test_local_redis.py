"""Redis under the supervisor: both roles survive a kill with the durable data; also a foreign
Redis.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import redis
from ipv6 import LOOPBACK_HOSTS
from redis.exceptions import AuthenticationError, ResponseError
from redis_servers import RedisServer
from watched_stream import WatchedStream

from paceline.config import RedisConfig, RunConfig, ServiceConfig
from paceline.errors import Unavailable
from paceline.local.launch import Launch, RestartPolicy
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.redis import RedisLauncher, resolved
from paceline.local.services import SERVICES
from paceline.local.supervisor import Supervisor, launch_of
from paceline.streams import connect, run_key


def redis_launches(config: ServiceConfig, words: Sequence[str]) -> list[Launch]:
    """Both servers of a run."""
    return [launch_of(spec, config, words) for spec in SERVICES if not spec.settings]


@pytest.mark.few(1)
@pytest.mark.parametrize("host", ["", *LOOPBACK_HOSTS])
async def test_both_roles_run_and_the_durable_one_keeps_its_data_over_a_kill(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    durable, features = (f"redis://{host}:{free_port()}/0" if host else "" for _ in range(2))
    urls = RedisConfig(durable_url=durable, features_url=features)
    config = ServiceConfig(run=RunConfig(dir=str(tmp_path)), redis=urls)
    words = [f"run.dir={tmp_path}", f"redis.durable_url={durable}"]
    launches = redis_launches(config, [*words, f"redis.features_url={features}"])
    async with Supervisor(launches, tmp_path, policy=RestartPolicy(base_s=0.05)) as supervisor:
        await supervisor.start(patient(20.0))
        client = connect(resolved(config).redis.durable_url)
        stream = WatchedStream(client, run_key(run_id, "s"))
        await stream.create_group("g")
        await stream.append({"n": "1"}, b"x")
        reading = asyncio.create_task(stream.read("g", "c", 2, 0.0))
        await reading
        os.kill(supervisor.pids["redis"], signal.SIGKILL)
        await stream.append({"n": "2"}, b"y")
        assert [entry.fields["n"] for entry in await stream.unacked("g", "c")] == ["1"]
        assert [entry.fields["n"] for entry in await stream.read("g", "c", 2, 5.0)] == ["2"]
        assert (tmp_path / "redis-durable").is_dir()
        await stream.close()
        await client.aclose()


@pytest.mark.slow
def test_a_second_server_over_a_directory_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)

    def launch() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline.local.redis", f"run.dir={tmp_path}"]
        url = f"redis.durable_url=redis://127.0.0.1:{free_port()}/0"
        return subprocess.Popen(
            [*command, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def serves(process: subprocess.Popen[str]) -> bool:
        assert process.stdout is not None
        return any("Ready to accept connections" in line for line in process.stdout)

    first = launch()
    assert serves(first)
    second = launch()
    _, refusal = second.communicate(timeout=patient(20))
    assert second.returncode == 1
    assert f"the redis-durable of {tmp_path} runs already; seen: pid {first.pid}, " in refusal
    first.kill()
    first.communicate()
    third = launch()
    assert serves(third)
    third.kill()
    third.communicate()


async def test_a_redis_that_others_run_and_is_not_there_fails_the_start_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    monkeypatch.setenv("REDIS_URL", url)
    monkeypatch.setattr("paceline.local.supervisor.EXTERNAL_REDIS_S", 0.3)
    supervisor = Supervisor(redis_launches(ServiceConfig(), []), tmp_path)
    with pytest.raises(Unavailable, match=f"Redis at {url} does not answer"):
        await supervisor.start(patient(20.0))


def test_with_a_redis_that_others_run_the_process_says_so_and_stays_until_a_signal() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.local.redis", "--role", "features"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "REDIS_URL": "rediss://user:secret@db:6379/0"},
    )
    assert process.stdout is not None
    assert (
        process.stdout.readline() == "redis.features_url is rediss://db:6379/0: nothing to start\n"
    )
    assert process.poll() is None
    process.terminate()
    assert process.wait(patient(10)) == -signal.SIGTERM
    process.stdout.close()


async def test_nobody_makes_a_server_of_ours_load_code_or_write_files(
    durable_server: RedisServer,
) -> None:
    client = connect(durable_server.url)
    for words in (
        ("CONFIG", "SET", "dir", "/tmp"),
        ("MODULE", "LOAD", "/tmp/x.so"),
        ("DEBUG", "RELOAD"),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("SLAVEOF", "127.0.0.1", "1"),
        ("MIGRATE", "127.0.0.1", "1", "k", "0", "1"),
        ("ACL", "SETUSER", "default", "+@all"),
        ("SAVE",),
        ("BGSAVE",),
        ("BGREWRITEAOF",),
        ("SHUTDOWN", "NOSAVE"),
        ("FLUSHALL",),
        ("RESTORE", "k", "0", "x"),
        ("MONITOR",),
        ("EVAL", "return redis.call('CONFIG', 'GET', 'dir')", "0"),
    ):
        with pytest.raises(ResponseError, match=r"no permissions|not allowed"):
            await client.execute_command(*words)
    await client.aclose()


@pytest.mark.parametrize("given", ["", "redis://127.0.0.1:{port}/0"], ids=["socket", "port"])
def test_a_server_of_ours_listens_where_nobody_else_gets_in(tmp_path: Path, given: str) -> None:
    launcher = RedisLauncher("durable", tmp_path / "r", given.format(port=free_port()))
    server = RedisServer(launcher)
    server.start()
    try:
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        assert launcher.url.partition("@")[0].removeprefix("redis://:") not in process.cmdline()
        listening = [each.laddr for each in process.net_connections("tcp")]
        if given:
            assert {address.ip for address in listening} == {"127.0.0.1"}
            with pytest.raises(AuthenticationError):
                redis.Redis.from_url(launcher.given_url).ping()
        else:
            assert listening == []
            assert stat.S_IMODE(launcher.socket.stat().st_mode) == 0o700
        with pytest.raises(Unavailable) as taken:
            launcher.prepare()  # a second server of the directory would steal the socket
        assert taken.value.reason == "PORT_IN_USE"
    finally:
        server.kill()
