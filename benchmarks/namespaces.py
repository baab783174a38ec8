"""Makes hosts with their own network on this machine: network namespaces joined by a switch.

Each host has one interface and an address. Its packets pass real sockets and can be lost.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.local.patience import patient

_TOOLS = ("unshare", "nsenter", "ip", "bridge")
NETWORK = "10.83.0"
_LINK = Path(__file__).with_name("slow_link.py")
_STOPPED_S, _RUNS_S = 0.15, 0.05
"""Seconds for which a slow host is stopped and runs, in turns: it runs a quarter of the time."""


def why_none() -> str:
    """Reason why this machine cannot make namespaces; "" if it can."""
    if os.geteuid() != 0:
        return "needs root: network namespaces joined by a bridge"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(lacking)}"
    words = ("unshare", "--net", "ip", "link", "add", "switch", "type", "bridge")
    tried = subprocess.run(words, capture_output=True, text=True, timeout=patient(20), check=False)
    return "" if not tried.returncode else f"no network namespaces: {tried.stderr.strip()}"


class Namespace:
    """A network namespace that lives until it is closed or its maker's process ends."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"made\n"
        self.pid = self._holder.pid
        self.within = ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *words: str) -> None:
        subprocess.run([*self.within, *words], check=True, timeout=patient(20))

    def processes(self) -> list[int]:
        """Ids of all processes in the namespace except its holder."""
        here, found = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended
                if os.readlink(path / "ns/net") == here and int(path.name) != self.pid:
                    found.append(int(path.name))
        return found

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal to all processes in the namespace; returns whether there were any."""
        found = self.processes()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(found)

    def close(self) -> None:
        while self.signal(signal.SIGKILL):
            pass
        for pipe in (self._holder.stdin, self._holder.stdout):
            assert pipe is not None
            pipe.close()
        self._holder.wait(patient(20))


class Host(Namespace):
    """A namespace at the switch, with an address of its own."""

    def __init__(self, switch: Namespace, number: int) -> None:
        super().__init__()
        self.address = f"{NETWORK}.{number}"
        self._switch, self._port = switch, f"port{number}"
        self._link: subprocess.Popen[str] | None = None

    def plug(self, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Connects the host to the switch.

        delay_ms: delay of each packet in either direction. loss: share of lost packets. With
        either, a slow link connects the host.
        """
        port, peer = self._port, f"peer{self._port}"
        if delay_ms or loss:
            words = [sys.executable, str(_LINK), port, peer, str(delay_ms), str(loss)]
            self._link = subprocess.Popen(
                [*self._switch.within, *words], stdout=subprocess.PIPE, text=True
            )
            assert self._link.stdout is not None
            assert self._link.stdout.readline() == "there\n"
        else:
            self._switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", peer)
        self._switch.run("ip", "link", "set", peer, "netns", str(self.pid))
        self._switch.run("ip", "link", "set", port, "master", "switch", "up")
        self.run("ip", "link", "set", peer, "name", "eth0")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "dev", "eth0")  # Ray looks for its address there

    def limit(self, mbit: int) -> None:
        """Limits the host's sending rate to `mbit` million bits per second."""
        rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
        self.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the host's interface has sent so far."""
        command = [*self.within, "ip", "-s", "-j", "link", "show", "eth0"]
        found = subprocess.run(command, check=True, capture_output=True, timeout=patient(20))
        return int(json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"])

    def cut(self) -> None:
        """Drops all packets from now on; no process is notified."""
        self._switch.run("bridge", "link", "set", "dev", self._port, "state", "disabled")

    def mend(self) -> None:
        self._switch.run("bridge", "link", "set", "dev", self._port, "state", "forwarding")

    def kill(self) -> None:
        """Kills all processes, as a power failure does."""
        while self.signal(signal.SIGKILL):
            pass

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Stops all processes of the host most of the time, inside the block."""
        over = threading.Event()

        def pulse() -> None:
            while not over.is_set():
                self.signal(signal.SIGSTOP)
                over.wait(_STOPPED_S)
                self.signal(signal.SIGCONT)
                over.wait(_RUNS_S)

        pulses = threading.Thread(target=pulse)
        pulses.start()
        try:
            yield
        finally:
            over.set()
            pulses.join()

    def close(self) -> None:
        super().close()
        if self._link is not None:
            self._link.kill()
            self._link.communicate(timeout=patient(20))


@contextmanager
def hosts(count: int, slow: Sequence[int] = (), **link: float) -> Iterator[list[Host]]:
    """Makes `count` hosts; the hosts numbered in `slow`, from 0 on, get the given link
    (Host.plug).
    """
    switch, made = Namespace(), list[Host]()
    try:
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        for number in range(count):
            made.append(Host(switch, number + 1))
            made[-1].plug(**(link if number in slow else {}))
        yield made
    finally:
        for one in made:
            one.close()
        switch.close()
