"""Tasks of an environment of the package verifiers, from the environment's own dataset.

A source is `verifiers:ID[?ARGUMENT=VALUE&...][#eval]`, such as `verifiers:gsm8k?num_eval=64`.
ID and arguments are those of `verifiers.load_environment`. `#eval` names the evaluation dataset.
A program of the agents' client loads the environment in a process of its own, because an
environment is foreign code and may need another Python.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from paceline.errors import ConfigError
from paceline.tasks import as_text, options_of

SOURCE = "verifiers:"
"""Begins a source, and the name of such an environment."""
ROW = "verifiers_row"
"""Key of a task's metadata: the row of the environment's dataset, as JSON."""
EVAL = "#eval"
"""Ends the source of held-out tasks."""
ALLOWED = f"{SOURCE}ID[?ARGUMENT=VALUE&...][{EVAL}]"
LOAD_S = 900.0
"""Maximum seconds in which an environment lists its tasks; it may download its dataset."""
_PROGRAM = Path(__file__).parents[1] / "client" / "verifiers_program.py"


def is_environment(name: object) -> bool:
    """Whether a path of tasks, or the name of an environment, is one of verifiers."""
    return str(name).startswith(SOURCE)


def command(name: str, python: str, **order: str) -> tuple[str, ...]:
    """The command of a child. `python`: of the environment; empty: this process's own. `order`:
    see the program. Raises ConfigError for a name of another form.
    """
    place, _, text = name.removeprefix(SOURCE).partition("#")[0].partition("?")
    if not place:
        raise ConfigError("no name of an environment of verifiers", seen=name, allowed=ALLOWED)
    given = json.dumps({"id": place, "args": options_of(text), **order})
    return (python or sys.executable, str(_PROGRAM), given)


def refused(text: str, source: str) -> ConfigError:
    """The error for an environment that cannot be used."""
    message = f"an environment of verifiers cannot be used: {text}"
    allowed = "pip install 'paceline[verifiers]' ENVIRONMENT, or run.verifiers_python that has both"
    return ConfigError(message, seen=source, allowed=allowed)


def read_answer(line: bytes, source: str) -> dict[str, Any]:
    """A message of a child. Raises ConfigError for a refusal."""
    found = dict[str, Any](json.loads(line))
    if "refused" in found:
        raise refused(found["refused"], source)
    return found


def read_rows(source: str, python: str = "") -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each task of an environment with its number, counted from 1.

    Raises ConfigError for an environment that cannot be loaded or has no such dataset.
    """
    split = "eval" if source.endswith(EVAL) else "train"
    with TemporaryFile() as listed:
        try:
            rows = "get_eval_dataset" if split == "eval" else "get_dataset"
            order = command(source, python, rows=rows)
            subprocess.run(order, stdout=listed, timeout=LOAD_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise refused(str(error), source) from error
        listed.seek(0)
        for number, line in enumerate(listed, start=1):
            row = read_answer(line, source)
            prompt, answer = row["prompt"], as_text(row.get("answer"))
            last = prompt[-1]["content"] if prompt and isinstance(prompt, list) else prompt
            asked = {"prompt": as_text(last) or "(no text)", "answer": answer}
            yield number, {"task_id": f"{split}-{number}", ROW: line.decode()} | asked
