"""Fixtures shared by all tests: real Redis servers, and a run prefix of its own for every test."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import structlog
from hypothesis import HealthCheck, settings
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from redis_servers import RedisServer

from paceline.local.forking import FORKSERVER_VARIABLE, forkserver_launch
from paceline.local.patience import patient
from paceline.local.processes import child_environment
from paceline.local.redis import RedisLauncher
from paceline.local.services import SERVICES
from paceline.streams import connect
from paceline.telemetry.metrics import use_meter

# A run draws the same cases each time; --hypothesis-profile=default draws new cases. The time of a
# case depends on the machine's load, so no deadline holds. `make test` draws fewer cases.
EVERY_RUN = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("fixed", **EVERY_RUN)
settings.register_profile("few", max_examples=25, **EVERY_RUN)
settings.load_profile("fixed")


# A background job of a shell ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# One thread each, here and in every process that a test starts: several tests share the cores, and
# a second thread for tiny products only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")

UMASK = os.umask(0o022)
os.umask(UMASK)

gc.disable()  # finds no garbage while test modules import torch and transformers, and costs time


SGLANG_MODELS = ("dflash", "llama", "llama_eagle", "llama_eagle3", "qwen2", "qwen3", "qwen3_moe")
"""Modules of SGLang with the models that tests serve. SGLang imports all of its 240 at each start,
which costs 1.7 s of CPU time.
"""
if (sglang := find_spec("sglang")) and sglang.submodule_search_locations:
    models = Path(sglang.submodule_search_locations[0], "srt/models").glob("*.py")
    others = sorted({path.stem for path in models} - {*SGLANG_MODELS})
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def pytest_collection_finish() -> None:
    """Freezes the imported objects, so that the garbage collector need not scan them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


LONGEST_S = 900.0
"""Longest wait of a test on any machine, unless the test sets a longer limit. A hanging test must
not block the rest.
"""


def timeout_of(item: pytest.Item) -> float:
    """Seconds that a test may take on a quiet machine."""
    marked = item.get_closest_marker("timeout")
    return float(marked.args[0] if marked else item.config.getvalue("timeout"))


SLOW_FOLDERS = ("unit/benchmarks", "recipes", "chaos")


def leave_few(items: list[pytest.Item]) -> None:
    """Mark as slow: tests of the slow folders, and all but `n` cases of each test marked `few(n)`.

    The cases that remain are evenly spread.
    """
    cases: dict[str, list[pytest.Item]] = {}
    tests = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(tests / folder) for folder in SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        marked = same[0].get_closest_marker("few")
        assert marked is not None
        kept = {index * len(same) // marked.args[0] for index in range(marked.args[0])}
        for index, item in enumerate(same):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long test files run first: started last, they would leave other workers idle."""
    leave_few(items)
    longest: dict[Path, float] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, 0.0), timeout_of(item))
    items.sort(key=lambda item: -longest[item.path])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test's timeout follows the machine's load, as the deadlines within the test do."""
    quiet_s = timeout_of(item)
    allowed_s = min(patient(quiet_s), max(quiet_s, LONGEST_S))
    item.add_marker(pytest.mark.timeout(allowed_s), append=False)
    return (yield)


class Loop(asyncio.SelectorEventLoop):
    """A loop that drops callbacks that arrive after its end.

    gRPC hands the events of all loops of a process to whichever loop runs. The last events of an
    earlier test would be an error in the log of a later test, and would delay the events behind
    them.
    """

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        if self.is_closed():
            return asyncio.Handle(callback, args, self, context)
        return super().call_soon_threadsafe(callback, *args, context=context)


class Loops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return Loop()


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return Loops()


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Restores log and umask after a service or command that ran in the tests' process."""
    yield
    structlog.reset_defaults()
    os.umask(UMASK)


@pytest.fixture(scope="session", autouse=True)
def forkserver(request: pytest.FixtureRequest) -> Iterator[None]:
    """Imports torch once for the ranks and engine workers that tests start, as in a run."""
    if all("unit" in item.path.parts for item in request.session.items):
        yield
        return
    launch = forkserver_launch([module for spec in SERVICES for module in spec.forked])
    assert launch.listening is not None
    environment = child_environment(dict(launch.environment))
    process = subprocess.Popen(launch.command, stdin=launch.listening, env=environment)
    os.environ[FORKSERVER_VARIABLE] = environment[FORKSERVER_VARIABLE]
    yield
    del os.environ[FORKSERVER_VARIABLE]
    process.kill()
    process.wait()


@pytest.fixture
def own_forkserver(forkserver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the processes that this test starts a separate forkserver, which the test may stop and
    kill.
    """
    monkeypatch.delenv(FORKSERVER_VARIABLE, raising=False)


@pytest.fixture
def no_late_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished coordinator hardly waits for late readers of its state."""
    monkeypatch.setattr("paceline.services.coordinator.server.FINISH_GRACE_S", 0.2)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the whole session; a run prefix separates the tests."""
    server = RedisServer(RedisLauncher("features", tmp_path_factory.mktemp("redis")))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def durable_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A durable server for one test, which may kill it."""
    server = RedisServer(RedisLauncher("durable", tmp_path / "redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the clock of the test's event loop by the given seconds, so that all timers until
    then are due. A test of a deadline can therefore use a long deadline, which no busy machine
    reaches by itself.
    """
    loop = asyncio.get_running_loop()
    real, skipped = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: real() + sum(skipped))
    return skipped.append


@pytest.fixture
def metric_reader() -> Iterator[InMemoryMetricReader]:
    """Metrics of this process since the test began."""
    reader = InMemoryMetricReader()
    use_meter(MeterProvider([reader]))
    yield reader
    use_meter(NoOpMeterProvider())


def _fetched(name: str, words: str = "") -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = home / "paceline" / "smollm2" / name
    if not found.is_dir():
        pytest.skip(f"no {found}: python examples/real/fetch_model.py {words}")
    return found


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Directory of the pretrained model that examples/real/fetch_model.py leaves in the cache."""
    return _fetched("SmolLM2-135M-Instruct")


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the package reasoning-gym, on the path of this process and of its children."""
    found = _fetched("reasoning-gym", "--tasks")
    monkeypatch.syspath_prepend(str(found))
    monkeypatch.setenv("PYTHONPATH", str(found), prepend=os.pathsep)
    return found


def _python_of(name: str, *packages: str) -> Path:
    """The Python of a virtual environment in the cache that has packages which Paceline's lacks."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "paceline" / name
    if not (folder / "bin" / "python").exists():
        words = " ".join(f"'{one}'" for one in packages)
        pytest.skip(f"no {folder}: python -m venv {folder} && {folder}/bin/pip install {words}")
    return folder / "bin" / "python"


@pytest.fixture
def verifiers_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python with verifiers, for children that find the environments of
    tests/verifiers_environments.py as `tiny_sums`.
    """
    found = _python_of("verifiers", "verifiers>=0.2,<0.4")
    modules = tmp_path / "modules"
    modules.mkdir()
    own = Path(__file__).with_name("verifiers_environments.py")
    (modules / "tiny_sums.py").write_text(own.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    return str(found)


@pytest.fixture(scope="session")
def openenv_python() -> str:
    """A Python with OpenEnv's package, for a server."""
    return str(_python_of("openenv", "openenv>=0.10,<0.11"))
