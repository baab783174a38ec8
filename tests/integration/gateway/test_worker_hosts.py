"""A gateway whose engine workers are on two hosts: what they answer, serve and capture, and what
becomes of them when one is killed. The second host is a process of its own at loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import redis.asyncio
from certificates import authority
from integration.gateway.commands import add, commit, drain, push, release, resume, workers
from integration.gateway.conftest import Ends, ServeGateway
from integration.gateway.http_agent import SLOW
from integration.gateway.test_open_traffic import redis_keys
from integration.gateway.test_partial_rollouts import SAMPLES, finished, rollout, until_tokens
from integration.gateway.test_staff import sessions, shares

from paceline.config import SecurityConfig
from paceline.errors import ConfigError, PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.report.machine import same_on_hosts
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engine_places import OF_A_HOST
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.replicas.serving import running
from paceline.services.rollout_gateway.worker_hosts import held_workers, local_workers
from paceline.services.rollout_gateway.workers.hosting import WorkerHost
from paceline.services.rollout_gateway.workers.local import LocalWorker
from paceline.streams import FeatureBatch, RedisStream, decode_features, run_key
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
APART = {"shared_spool": False}
TWO_HOSTS = {"workers": 0, "hosts": (1, 1)}


def words(settings: dict[str, Any], before: str = "") -> Iterator[str]:
    """Settings as a command line has them."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from words(value, f"{before}{name}.")
        else:
            yield f"{before}{name}={json.dumps(value)}"


@asynccontextmanager
async def host(
    settings: dict[str, Any], number: int = 1
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that holds engine workers of the gateway with these settings."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "paceline.services.rollout_gateway.worker_host",
        *("--host", str(number)),
        *words(settings),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> str:
    """What a host has said when it is told to end."""
    process.terminate()
    return (await process.communicate())[1].decode()


class Hosts:
    """Gateway and host with the same settings."""

    def __init__(self, serve: ServeGateway, model: Path) -> None:
        self._serve = serve
        self._model = model
        self.port = free_port()

    def settings(self, **keys: Any) -> dict[str, Any]:
        engine = {
            "kind": "scripted",
            "script": str(self._model.parent / "script.json"),
            **TWO_HOSTS,
            **keys.pop("engine", {}),
        }
        return {
            "model": str(self._model),
            "addresses": {"gateway": f"127.0.0.1:{self.port}", "http": "127.0.0.1:0"},
            "spool_dir": str(self._model.parent / "spool"),
            "engine": engine,
            **keys,
        }

    def host(self, number: int = 1, **keys: Any) -> Any:
        return host(self.settings(**keys), number)

    def gateway(self, **keys: Any) -> Any:
        return self._serve(**self.settings(**keys))


@pytest.fixture
def hosts(serve_gateway: ServeGateway, model_dir: Path) -> Hosts:
    return Hosts(serve_gateway, model_dir)


async def test_workers_of_two_hosts_share_tasks_and_serve_what_is_pushed(hosts: Hosts) -> None:
    async with hosts.host() as other, hosts.gateway() as served:
        first, second = await workers(served)
        assert (first.host, second.host) == (0, 1)
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        assert [one.health.versions.policy for one in await workers(served)] == [1, 1]
        news = await finished(served, served.tasks_request())
        assert shares(news) == {0: 2, 1: 2}
        assert len(set(sessions(news))) == SAMPLES
        await release(served, 1, 1)
        assert await resume(served, 2) == ([1], 1)
        assert other.returncode is None


@asynccontextmanager
async def held_here(hosts: Hosts, told: list[pb.PrepareWeights]) -> AsyncIterator[None]:
    """The other host in this process, without a path to the spool; `told`: what its workers are
    told to load.
    """

    class Told(LocalWorker):
        def send(self, command: bytes) -> None:
            message = pb.WorkerCommand.FromString(command)
            if message.HasField("prepare_weights") and self._spec.worker_index == 1:
                told.append(message.prepare_weights)
            super().send(command)

    config = GatewayConfig.model_validate(hosts.settings(engine=APART))
    held = held_workers(config, 1)
    (worker_host,) = held.of_replicas.values()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.services.rollout_gateway.workers.local.LocalWorker", Told)
        address = config.addresses.gateway
        holding = asyncio.create_task(worker_host.hold(address, SecurityConfig(), patient(60)))
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await held.close()


async def test_a_host_without_the_spool_copies_what_is_pushed_for_its_workers(
    hosts: Hosts, script: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "script.json").write_text(json.dumps(script))
    told: list[pb.PrepareWeights] = []
    async with held_here(hosts, told), hosts.gateway(engine=APART) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        assert [one.health.versions.policy for one in await workers(served)] == [1, 1]
    spool = Path(hosts.settings()["spool_dir"])
    copy = spool.with_name(f"{spool.name}-host-1") / "policy-1"
    assert told[-1].path == str(copy)
    kept = {name.name: name.read_bytes() for name in copy.iterdir()}
    assert kept == {name.name: name.read_bytes() for name in (spool / "policy-1").iterdir()}


async def test_a_version_that_a_host_cannot_copy_is_refused_by_its_workers(
    hosts: Hosts, script: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "script.json").write_text(json.dumps(script))
    spool = Path(hosts.settings()["spool_dir"])
    spool.with_name(f"{spool.name}-host-1").write_text("no directory")
    async with held_here(hosts, told := []), hosts.gateway(engine=APART) as served:
        with pytest.raises(PacelineError, match="policy-1 cannot be written"):
            await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        assert [one.ready for one in await workers(served)] == [True, True]
    assert not told


async def test_hosts_copy_from_each_other_by_mutual_tls(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any]
) -> None:
    (tmp_path / "script.json").write_text(json.dumps(script))
    monkeypatch.setenv("OWN_TOKEN", "of-this-run")
    own = authority(tmp_path, "own", "OWN_TOKEN")
    given = {"security": own.model_dump(mode="json", exclude_unset=True)}
    given["engine"] = {**APART, "hosts": (1, 1, 1), "copies_fan_out": 1}
    async with hosts.host(**given) as first, hosts.host(2, **given) as second:
        config = GatewayConfig.model_validate(hosts.settings(**given))
        async with running(config) as head:
            async with channel(f"127.0.0.1:{head.grpc_port}", own) as peer:
                served = SimpleNamespace(config=config, channel=peer, stub=RolloutServiceStub(peer))
                await push(served, pb.WEIGHT_TARGET_POLICY, 1)
                await commit(served, VersionSet(1, 1, 0))
                there = await workers(served)
            assert [one.health.versions.policy for one in there] == [1, 1, 1]
        said = {1: await ended(first), 2: await ended(second)}
    assert re.search(r"version_copied .*source=gateway", said[1])
    assert re.search(r"version_copied .*source=127.0.0.1:\d+", said[2])


async def test_hidden_rows_of_a_worker_on_another_host_are_those_of_one_here(
    hosts: Hosts, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    engine = {"kind": "embedded", "max_sequence_tokens": 128}
    keys = {**redis_keys(redis_url, run_id), "model": str(POLICY), "engine": engine}
    keys |= {"drafter": "eagle", "features": {"dtype": "float32"}}
    async with hosts.host(**keys), hosts.gateway(**keys) as served:
        for worker in (0, 1):
            request = served.tasks_request(step=worker, capture=True, forced_arm="off")
            request.workers.append(worker)
            assert shares(await finished(served, request)) == {worker: SAMPLES}
        batches = await features_of(redis_client, run_id, 2 * SAMPLES)
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert status.feature_rows_dropped == 0
    here, there = ({prompt_rows(one) for one in batches if one.step == worker} for worker in (0, 1))
    assert len(here) == 2  # of two tasks
    assert here == there


def prompt_rows(batch: FeatureBatch) -> tuple[bytes, bytes]:
    """Tokens of the prompt and their states, which all samples of a task have alike."""
    prompt = int(np.argmax(batch.mask)) if batch.mask.any() else batch.rows
    width = len(bytes(batch.hidden.data)) // batch.rows
    return batch.token_ids[:prompt].tobytes(), bytes(batch.hidden.data)[: prompt * width]


async def features_of(client: redis.asyncio.Redis, run_id: str, count: int) -> list[Any]:
    stream = RedisStream(client, run_key(run_id, "features"))
    await stream.create_group("test")
    found: list[Any] = []
    async with asyncio.timeout(patient(20)):
        while len(found) < count:
            found += await stream.read("test", "c", count, 1.0)
    return [decode_features(one.fields, one.payload) for one in found]


async def test_tasks_go_on_when_a_host_is_killed_and_its_place_serves_again_with_another(
    hosts: Hosts, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with hosts.host() as doomed, hosts.gateway() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        family = [psutil.Process((await workers(served))[1].pid)]
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, 5 * SAMPLES)
        doomed.kill()
        ends.come()
        assert len(set(sessions(await run))) == SAMPLES
        assert [one.ready for one in await workers(served)] == [True, False]
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, patient(10))
        assert not alive, "workers outlive their host"
        async with hosts.host():
            async with asyncio.timeout(patient(60)):
                while not (await workers(served))[1].ready:
                    pass
            assert [one.health.versions.policy for one in await workers(served)] == [1, 1]
            assert shares(await finished(served, served.tasks_request(step=1))) == {0: 2, 1: 2}


async def test_a_worker_that_is_killed_on_another_host_is_started_there_again(
    hosts: Hosts,
) -> None:
    async with hosts.host() as other, hosts.gateway() as served:
        held = psutil.Process(other.pid)
        before, opened = (await workers(served))[1].pid, held.num_fds()
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(patient(60)):
            while not (after := (await workers(served))[1]).ready or after.pid == before:
                pass
            while held.num_fds() > opened:  # of the former worker
                await workers(served)
        assert shares(await finished(served, served.tasks_request())) == {0: 2, 1: 2}


async def test_a_worker_is_added_on_another_host_and_leaves_it(hosts: Hosts) -> None:
    engine = {"workers": 1}
    async with hosts.host(engine=engine), hosts.gateway(engine=engine) as served:
        await add(served, 1, 1)
        assert shares(await finished(served, served.tasks_request())) == {0: 2, 1: 2}
        (_, added) = await workers(served)
        await drain(served, 2, 1)
        assert not psutil.pid_exists(added.pid)


async def test_a_gateway_starts_again_without_a_host_and_takes_it_in_when_it_is_there(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.rollout_gateway.workers.hosts.JOIN_S", 0.2)
    async with hosts.gateway() as served:
        assert [one.ready for one in await workers(served)] == [True, False]
        assert len(sessions(await finished(served, served.tasks_request()))) == SAMPLES
        async with hosts.host(), asyncio.timeout(patient(60)):
            while not (await workers(served))[1].ready:
                pass


async def test_who_calls_while_hosts_are_awaited_is_told_that_the_gateway_starts(
    hosts: Hosts,
) -> None:
    async def calls() -> None:
        async with channel(f"127.0.0.1:{hosts.port}", SecurityConfig()) as peer:
            await wait_ready(peer, patient(30))
            with pytest.raises(Unavailable, match="it is starting"), rpc_errors():
                await RolloutServiceStub(peer).GetStatus(rpb.GetStatusRequest(), timeout=20)

    async def begins() -> None:
        async with hosts.gateway():
            pass

    gateway = asyncio.create_task(begins())
    await calls()
    async with hosts.host():
        await gateway


async def test_a_host_without_the_spool_says_so_instead_of_starting_a_worker(
    hosts: Hosts, tmp_path: Path, script: dict[str, Any]
) -> None:
    (tmp_path / "script.json").write_text(json.dumps(script))
    config = GatewayConfig.model_validate(hosts.settings())
    same = same_on_hosts(config, OF_A_HOST)
    local = local_workers(config, 1)
    held = WorkerHost(local, 1, 1, tmp_path / "elsewhere", same)
    address = config.addresses.gateway
    holding = asyncio.create_task(held.hold(address, SecurityConfig(), patient(60)))
    with pytest.raises(Unavailable, match=r"does not have the gateway's spool.*elsewhere"):
        async with hosts.gateway():
            pass
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await local.close()


async def test_hosts_join_by_mutual_tls_and_with_the_token(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_TOKEN", "of-this-run")
    own, foreign = (authority(tmp_path, name, "OWN_TOKEN") for name in ("own", "foreign"))
    given = {"security": own.model_dump(mode="json", exclude_unset=True)}
    others = {"security": foreign.model_dump(mode="json", exclude_unset=True)}
    config = GatewayConfig.model_validate(hosts.settings(**given))
    (tmp_path / "script.json").write_text("{}")
    async with hosts.host(**others) as refused, hosts.host(**given), running(config) as head:
        async with channel(f"127.0.0.1:{head.grpc_port}", own) as peer:
            status = await RolloutServiceStub(peer).GetStatus(rpb.GetStatusRequest(), timeout=20)
        assert [one.ready for one in status.workers] == [True, True]
        assert refused.returncode is None, "it tries on"


@pytest.mark.parametrize(
    ("number", "settings", "said"),
    [
        (0, {}, "host 0 is the gateway's own; seen: --host 0"),
        (2, {}, "gives no workers to this host"),
        (1, {"seed": 9}, "other settings .* than the service of its workers; seen: run in the"),
        (2, {"hosts": (1, 1, 1)}, "no engine workers are expected on this host; seen: host 2"),
    ],
)
async def test_a_host_that_does_not_fit_is_refused_by_name(
    hosts: Hosts, number: int, settings: dict[str, Any], said: str
) -> None:
    own: dict[str, Any] = {"run": {"seed": settings["seed"]}} if "seed" in settings else {}
    if "hosts" in settings:
        own["engine"] = {"hosts": settings["hosts"]}
    async with hosts.host(), hosts.gateway(), hosts.host(number, **own) as refused:
        _, errors = await asyncio.wait_for(refused.communicate(), patient(60))
        assert refused.returncode in (1, 2)
        assert re.search(said, errors.decode()), errors.decode()


async def test_a_second_host_of_a_number_waits_until_the_first_has_gone(hosts: Hosts) -> None:
    async with hosts.host() as first, hosts.gateway() as served:
        before = (await workers(served))[1].pid
        async with hosts.host() as second:
            assert second.stderr is not None
            async with asyncio.timeout(patient(60)):
                while b"a host of this number" not in await second.stderr.readline():
                    pass
            first.kill()
            async with asyncio.timeout(patient(60)):
                while not (found := (await workers(served))[1]).ready or found.pid == before:
                    pass


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"engine": {"hosts": (1, 1), "workers": 3}}, "at most 2 workers"),
        ({"engine": {"hosts": (1, 1), "most_workers": 3}}, "most_workers 0 or 2"),
        ({"engine": {"hosts": (1, 1)}, "spool_dir": ""}, "gateway.spool_dir, on a path that all"),
    ],
)
async def test_settings_of_hosts_that_cannot_be_are_refused(
    hosts: Hosts, keys: dict[str, Any], said: str
) -> None:
    config = GatewayConfig.model_validate({**hosts.settings(), **keys})
    with pytest.raises(ConfigError, match=said):
        Gateway(config)
