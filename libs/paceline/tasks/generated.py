"""Generates tasks with the package reasoning-gym, and scores answers with its own verifiers.

A source is `reasoning_gym:FAMILY[?OPTION=VALUE&...],FAMILY...[#SEED]`, as in
`reasoning_gym:chain_sum?max_terms=3&size=4000,gcd#1`. Options are those of the family's generator.
Two options are added: `size`, the family's number of tasks and so its weight in a mixture, and
`system`, the name of a system prompt of reasoning-gym; with `system=` the run's own
`coordinator.system_prompt` applies. Family, options, seed and index determine a
task, so tasks are not stored. Another seed gives held-out tasks.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from paceline.tasks import SYSTEM, TaskFileError
from paceline.tasks.verifiers import heldout_of, is_environment, option_value, scores_itself

SOURCE = "reasoning_gym:"
"""Begins a source; the part before the colon is also the name of the reward rule."""
FAMILY, INDEX = "family", "index"
"""Keys of a task's metadata: its generator as `NAME?OPTION=VALUE#SEED`, and its index there."""
SIZE = 2_000
"""Tasks of a family without the option `size`."""
SEED_STRIDE = 1_000_000
"""reasoning-gym draws task i of seed s with s + i, so that near seeds share tasks."""
ALLOWED = f"{SOURCE}FAMILY[?OPTION=VALUE&...],FAMILY...[#SEED]"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COMMA = re.compile(r",(?=[a-z])")
"""Separates families; values of options are JSON, in which no bare word follows a comma."""


def is_generated(path: object) -> bool:
    """Whether a path of tasks is a source of generated tasks."""
    return str(path).startswith(SOURCE)


def usual_reward(tasks: object, environment: str = "") -> str:
    """The reward rule of a source of generated tasks, of a task file, or of the environment."""
    if scores_itself(environment) or is_environment(tasks):
        return "agent"
    return SOURCE[:-1] if is_generated(tasks) else "math_answer"


def environment_of(tasks: object) -> str:
    """The environment of a source: that of verifiers, else one answer of the model."""
    return str(tasks).partition("#")[0] if is_environment(tasks) else "single_turn"


def other_seed(source: str) -> str:
    """The same families with the next seed, or the same environment's evaluation dataset, for
    held-out tasks.
    """
    if is_environment(source):
        return heldout_of(source)
    families, _, seed = source.partition("#")
    return f"{families}#{int(seed or 0) + 1}"


def generate_records(source: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each record with its number, counted from 1; the families take turns.

    Raises TaskFileError for an unknown family or option, and without the package.
    """
    families, _, seed = source.removeprefix(SOURCE).partition("#")
    names = [f"{one}#{seed or 0}" for one in _COMMA.split(families)]
    generators = {name: _generator(name) for name in names}
    number = 0
    for index in range(max(len(dataset) for dataset, _ in generators.values())):
        for name, (dataset, system) in generators.items():
            if index < len(dataset):
                number += 1
                found = {"task_id": f"{name.partition('?')[0].partition('#')[0]}-{number}"}
                asked = {"prompt": dataset[index]["question"], "answer": _answer(dataset, index)}
                told = {SYSTEM: system} if system else {}
                yield number, found | asked | told | {FAMILY: name, INDEX: str(index)}


def _answer(dataset: Any, index: int) -> str:
    answer = dataset[index]["answer"]
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


@lru_cache(maxsize=64)
def _generator(family: str) -> tuple[Any, str]:
    """The dataset of `NAME?OPTION=VALUE&...#SEED`, and its system prompt."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
        from reasoning_gym.utils import SYSTEM_PROMPTS
    except ImportError as error:
        raise TaskFileError(
            f"generated tasks need the package reasoning-gym ({error})",
            seen=family,
            allowed="pip install 'paceline[reasoning-gym]'",
        ) from error
    named, _, seed = family.partition("#")
    name, _, given = named.partition("?")
    if name not in DATASETS:
        raise TaskFileError("no such family", seen=name, allowed=", ".join(sorted(DATASETS)))
    options = {"size": SIZE}
    try:
        pairs = (one.partition("=") for one in given.split("&") if one)
        options |= {key: option_value(value) for key, _, value in pairs}
        prompt = options.pop("system", "default")
        system = SYSTEM_PROMPTS[prompt] if prompt else ""
        return create_dataset(name, seed=int(seed) * SEED_STRIDE, **options), system
    except Exception as error:  # a generator may raise anything
        message = f"tasks of {name} cannot be generated: {type(error).__name__}: {error}"
        raise TaskFileError(message, seen=family, allowed=ALLOWED) from error


class GeneratedAnswer:
    """Scores a response with the verifier of its task's family.

    The answer is in the last <answer> tags, as the system prompts of reasoning-gym demand. Without
    tags it is the last number, if the task's answer is a number, else the whole response.
    """

    def score(self, episode: Any) -> float:
        """0 to 1. Raises TaskFileError or KeyError for a task of another origin."""
        from reasoning_gym.utils import extract_answer

        metadata = episode.task.metadata
        dataset, _ = _generator(metadata[FAMILY])
        answer = extract_answer(episode.text)
        if answer is None:
            numbers = _NUMBER.fullmatch(episode.task.answer) and _NUMBER.findall(episode.text)
            answer = numbers[-1] if numbers else episode.text.strip()
        return float(dataset.score_answer(answer, dataset[int(metadata[INDEX])]))
