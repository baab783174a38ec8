"""Reports an offline run: lines on the terminal, and OUT/log.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console


class TerminalLines:
    """Prints one line per message of rank 0, and every `log_every`-th step."""

    def __init__(self, console: Console, log_every: int) -> None:
        self._console, self._log_every = console, log_every

    def say(self, text: str) -> None:
        """Prints one line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, message: dict[str, Any]) -> None:
        """Prints a message as a line, if it has one."""
        match message["kind"]:
            case "step":
                if message["step"] % self._log_every == 0 or message["step"] in (
                    1,
                    message["steps"],
                ):
                    self.say(_step(message))
            case "heldout":
                self.say(_heldout(message))
            case "saved":
                self.say(f"step {message['step']}: saved {message['directory']}")
            case "damaged":
                self.say(f"{message['fault']}; the step saved before it is taken")
            case "resumed":
                self.say(f"goes on after step {message['step']}")
            case "answers":
                self.say(
                    f"answers of the model itself: {message['done']} of {message['of']} (rank 0)"
                )
            case "data":
                rest = ", ".join(
                    f"{message[n]} {n.replace('_', ' ')}" for n in ("cut", "left_out") if message[n]
                )
                self.say(f"{message['sequences']} sequences{f' ({rest})' if rest else ''}")
            case other:
                raise ValueError(f"no such message: {other}")


def _step(message: dict[str, Any]) -> str:
    terms = "  ".join(f"{name} {value:.4f}" for name, value in message["terms"].items())
    rate = message["positions"] / max(message["seconds"], 1e-9)
    return (
        f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}  {terms}  "
        f"{rate:.0f} positions/s"
    )


def _heldout(message: dict[str, Any]) -> str:
    return (
        f"step {message['step']}: held-out E[len] {message['length']:.3f} of "
        f"{message['positions']} positions; "
        f"draft 1, 2, ... right: {_shares(message['conditional'])} if those before are, "
        f"{_shares(message['survival'])} with those before"
    )


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


class RunLog:
    """Appends a line per optimiser step and judgement, each with its `step`; only one rank writes
    it.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path, self._keep = path, keep

    def keep_to(self, step: int) -> None:
        """Drops lines of later steps, since a resumed run writes them again."""
        if not self._keep or not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A process that died during a write leaves a line without an end.
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(kept if step else []), encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line."""
        if self._keep:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
