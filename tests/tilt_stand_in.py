"""Takes the place of Tilt: evaluates the Tiltfile in Starlark and executes its resources."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import starlark as sl

ROOT = Path(__file__).resolve().parents[1]
PRELUDE = """
config = struct(define_string = _define_string, parse = _parse)
"""
Resource = dict[str, Any]


def tilt_dialect() -> sl.Dialect:
    """Tilt's own Starlark dialect: no f-strings, no types."""
    dialect = sl.Dialect.standard()
    dialect.enable_lambda = dialect.enable_top_level_stmt = True
    dialect.enable_def = dialect.enable_keyword_only_arguments = True
    dialect.enable_f_strings = False
    return dialect


def resources_of(settings: Mapping[str, str]) -> dict[str, Resource]:
    """Resources of the Tiltfile by name, in its order; `settings`: options after `tilt up --`."""
    found: dict[str, Resource] = {}

    def local_resource(name: str, **values: Any) -> None:
        assert name not in found, f"{name} is defined twice"
        found[name] = values

    def local(*arguments: Any, **values: Any) -> None:
        raise AssertionError("Tilt refuses local() where a kubecontext looks like production")

    module = sl.Module()
    module["TRIGGER_MODE_MANUAL"] = "manual"
    functions: dict[str, Callable[..., Any]] = {
        "local_resource": local_resource,
        "local": local,
        "_define_string": lambda name: None,
        "_parse": lambda: dict(settings),
        "update_settings": lambda max_parallel_updates: None,
        "probe": lambda **values: values,
        "http_get_action": lambda port, host="localhost", scheme="http", path="": {
            "url": f"{scheme}://{host}:{port}{path}",
            "address": (host, port),
            "path": path,
        },
        "tcp_socket_action": lambda port, host="localhost": {"address": (host, port)},
        "exec_action": lambda command: {"command": command},
        "link": lambda url, name: {"url": url, "name": name},
    }
    for name, function in functions.items():
        module.add_callable(name, function)
    names = sl.Globals.extended_by([sl.LibraryExtension.StructType])
    for name, text in (("prelude", PRELUDE), ("Tiltfile", (ROOT / "Tiltfile").read_text())):
        sl.eval(module, sl.parse(name, text, tilt_dialect()), names)
    return found


class TiltCi:
    """`tilt ci`: starts all automatic resources in the order of their dependencies. Succeeds when
    all servers are ready and all commands have ended well.
    """

    def __init__(self, resources: Mapping[str, Resource], logs: Path, deadline_s: float) -> None:
        self._resources = {n: r for n, r in resources.items() if r.get("auto_init", True)}
        self._logs, self._end_s = logs, time.monotonic() + deadline_s
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self.ready: list[str] = []

    def run(self) -> None:
        """Raises AssertionError with the resource's name where Tilt would fail."""
        try:
            while waiting := [name for name in self._resources if name not in self.ready]:
                name = next(n for n in waiting if set(self._needs(n)) <= set(self.ready))
                self._update(name)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the remaining servers, in reverse order."""
        for server in reversed(self._servers.values()):
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
        for server in self._servers.values():
            server.wait(60)

    def _needs(self, name: str) -> list[str]:
        return self._resources[name].get("resource_deps", [])

    def _update(self, name: str) -> None:
        resource = self._resources[name]
        with (self._logs / f"{name}.log").open("wb") as log:
            if "cmd" in resource:
                command = self._begin(resource["cmd"], log)
                try:
                    command.wait(self._end_s - time.monotonic())
                finally:
                    if command.poll() is None:
                        os.killpg(command.pid, signal.SIGKILL)
                assert command.returncode == 0, f"{name}: {self.log(name)}"
            if "serve_cmd" in resource:
                self._servers[name] = self._begin(resource["serve_cmd"], log)
                probe = resource.get("readiness_probe")
                while probe is not None and not probed(probe):
                    assert self._servers[name].poll() is None, f"{name} ended: {self.log(name)}"
                    assert time.monotonic() < self._end_s, f"{name} is not ready: {self.log(name)}"
                    time.sleep(probe["period_secs"] / 10)
        for served, process in self._servers.items():
            assert process.poll() is None, f"{served} ended: {self.log(served)}"
        self.ready.append(name)

    def log(self, name: str) -> str:
        """The last 2,000 characters of a resource's log."""
        return (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]

    @staticmethod
    def _begin(command: list[str], log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
        )


def probed(probe: Mapping[str, Any]) -> bool:
    """One probe, as Tilt's own prober makes it."""
    try:
        if action := probe.get("tcp_socket"):
            with socket.create_connection(action["address"], probe["timeout_secs"]):
                return True
        action = probe["http_get"]
        connection = http.client.HTTPConnection(*action["address"], timeout=probe["timeout_secs"])
        connection.request("GET", action["path"])
        status = connection.getresponse().status
        connection.close()
        return 200 <= status < 400
    except OSError:
        return False
