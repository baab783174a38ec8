"""Tasks of an environment of the package verifiers, from the environment's own dataset.

A source is `verifiers:ID[?ARGUMENT=VALUE&...][#eval]`, such as `verifiers:gsm8k?num_eval=64`.
ID and arguments are those of `verifiers.load_environment`. `#eval` names the evaluation dataset.
The program of verifiers_program.py loads the environment in a process of its own, because an
environment is foreign code and may need another Python.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from tempfile import TemporaryFile
from typing import Any

from paceline.errors import ConfigError
from paceline.tasks import verifiers_program

SOURCE = "verifiers:"
"""Begins a source, and the name of such an environment."""
ROW = "verifiers_row"
"""Key of a task's metadata: the row of the environment's dataset, as JSON."""
EVAL = "#eval"
"""Ends the source of held-out tasks."""
ALLOWED = f"{SOURCE}ID[?ARGUMENT=VALUE&...][{EVAL}]"
LOAD_S = 900.0
"""Maximum seconds in which an environment lists its tasks; it may download its dataset."""
INSTALLED = (
    "an environment that loads: pip install 'paceline[verifiers]' and the environment's own "
    "package, or a Python that has both in run.verifiers_python"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")


def is_environment(name: object) -> bool:
    """Whether a path of tasks, or the name of an environment, is one of verifiers."""
    return str(name).startswith(SOURCE)


def scores_itself(environment: str) -> bool:
    """Whether an environment has rewards of its own, so that no rule scores its samples."""
    return environment.startswith((SOURCE, "openenv:"))


def heldout_of(source: str) -> str:
    """The same environment's evaluation dataset."""
    return source.partition("#")[0] + EVAL


def order_of(name: str) -> dict[str, Any]:
    """`id` and `args` of an environment. Raises ConfigError for a name of another form."""
    place, _, given = name.removeprefix(SOURCE).partition("#")[0].partition("?")
    pairs = [one.partition("=") for one in given.split("&") if one]
    if not _NAME.fullmatch(place) or not all(key and found for key, found, _ in pairs):
        raise ConfigError("no name of an environment of verifiers", seen=name, allowed=ALLOWED)
    return {"id": place, "args": {key: option_value(text) for key, _, text in pairs}}


def option_value(text: str) -> Any:
    """The value of an option: JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def command(python: str, order: Mapping[str, Any]) -> tuple[str, ...]:
    """The command of a child. `python`: of the environment; empty: this process's own."""
    return (python or sys.executable, verifiers_program.__file__, json.dumps(order))


def refused(text: str, source: str) -> ConfigError:
    """The error for an environment that cannot be used."""
    message = f"an environment of verifiers cannot be used: {text}"
    return ConfigError(message, seen=source, allowed=INSTALLED)


def read_rows(source: str, python: str = "") -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each task of an environment with its number, counted from 1.

    Raises ConfigError for an environment that cannot be loaded or has no such dataset.
    """
    split = "eval" if source.endswith(EVAL) else "train"
    order = order_of(source) | {"split": split}
    with TemporaryFile() as listed:
        try:
            done = subprocess.run(command(python, order), stdout=listed, timeout=LOAD_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise refused(str(error), source) from error
        listed.seek(0)
        for number, line in enumerate(listed, start=1):
            found = json.loads(line)
            if "refused" in found:
                raise refused(found["refused"], source)
            asked = {"prompt": found["prompt"] or "(no text)", "answer": found["answer"]}
            yield number, {"task_id": f"{split}-{number}"} | asked | {ROW: found["row"]}
    if done.returncode:
        raise refused(f"its process ended with exit code {done.returncode}", source)
