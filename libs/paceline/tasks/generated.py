"""Generates tasks with the package reasoning-gym, and scores answers with its own verifiers.

A source is `reasoning_gym:FAMILY[?OPTION=VALUE&...],FAMILY...[#SEED]`, as in
`reasoning_gym:chain_sum?max_terms=3&size=4000,gcd#1`. Options are those of the family's generator.
Four options are added:

- `size`: the largest number of the family's tasks;
- `weight`: the family's share of a mixture;
- `level`: the level of the family's curriculum, for all of its attributes or as JSON for some;
- `system`: the name of a system prompt of reasoning-gym; with `system=` the run's own
  `coordinator.system_prompt` applies.

Family, options, seed and index determine a task, so tasks are not stored. Another seed gives
held-out tasks.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from paceline.tasks import SYSTEM, TaskFileError, as_text, options_of, scores_itself
from paceline.tasks.verifiers import EVAL, is_environment

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
    families, _, seed = source.partition("#")
    if is_environment(source):
        return families + EVAL
    return f"{families}#{int(seed or 0) + 1}"


def generate_records(source: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each record with its number, counted from 1; the families take turns.

    Raises TaskFileError for an unknown family or option, and without the package.
    """
    families, _, seed = source.removeprefix(SOURCE).partition("#")
    names = [f"{one}#{seed or 0}" for one in _COMMA.split(families)]
    generators = {name: _generator(name) for name in names}
    counts, number = _counts([one[::2] for one in generators.values()]), 0
    for index in range(max(counts)):
        for (name, (dataset, system, _)), count in zip(generators.items(), counts, strict=True):
            if index < count:
                number += 1
                found = {"task_id": f"{name.partition('?')[0].partition('#')[0]}-{number}"}
                asked = {
                    "prompt": dataset[index]["question"],
                    "answer": as_text(dataset[index]["answer"]),
                }
                told = {SYSTEM: system} if system else {}
                yield number, found | asked | told | {FAMILY: name, INDEX: str(index)}


def _counts(families: Sequence[tuple[Any, float]]) -> list[int]:
    """Tasks of each dataset in the proportion of the weights, at most all and at least one of each.
    A dataset without a weight (0) has weight 1 beside other weights, else all of its tasks.
    """
    if not any(weight for _, weight in families):
        return [len(dataset) for dataset, _ in families]
    share = min(len(dataset) / (weight or 1) for dataset, weight in families)
    return [max(1, round((weight or 1) * share)) for _, weight in families]


@lru_cache(maxsize=64)
def _generator(family: str) -> tuple[Any, str, float]:
    """The dataset of `NAME?OPTION=VALUE&...#SEED`, its system prompt and its weight (0: none)."""
    try:
        from reasoning_gym.factory import CURRICULA, DATASETS, create_dataset
        from reasoning_gym.utils import SYSTEM_PROMPTS
    except ImportError as error:
        raise TaskFileError(
            f"generated tasks need the package reasoning-gym ({error})",
            seen=family,
            allowed="pip install 'paceline[reasoning-gym]'",
        ) from error
    named, _, seed = family.partition("#")
    name, _, text = named.partition("?")
    if name not in DATASETS:
        raise TaskFileError("no such family", seen=name, allowed=", ".join(sorted(DATASETS)))
    given = options_of(text)
    options = {"size": SIZE} | given
    weight = options.pop("weight", 0)
    if "weight" in given and not (type(weight) in (int, float) and 0 < weight < math.inf):
        raise TaskFileError(f"the weight of {name}", seen=weight, allowed="a number above 0")
    try:
        if (level := options.pop("level", None)) is not None:
            if name not in CURRICULA:
                raise ValueError("the family has no curriculum, so no level")
            options = _levelled(CURRICULA[name](), level) | options
        prompt = options.pop("system", "default")
        system = SYSTEM_PROMPTS[prompt] if prompt else ""
        return create_dataset(name, seed=int(seed) * SEED_STRIDE, **options), system, weight
    except Exception as error:  # a generator may raise anything
        message = f"tasks of {name} cannot be generated: {type(error).__name__}: {error}"
        raise TaskFileError(message, seen=family, allowed=ALLOWED) from error


def _levelled(curriculum: Any, level: Any) -> dict[str, Any]:
    """Options of a family at a level of its curriculum: a number for all attributes, each at most
    at its highest level, or numbers by attribute. Raises ValueError for a level beyond.
    """
    if not isinstance(level, dict):
        highest = max(len(one.levels) for one in curriculum.attributes.values()) - 1
        if level not in range(highest + 1):
            raise ValueError(f"level is {level}, not in 0..{highest}")
        curriculum.set_global_level(level)
    else:
        for attribute, number in level.items():
            curriculum.set_attr_level(attribute, number)
    found = dict(vars(curriculum.generate_configuration()))
    del found["seed"]
    return found


class GeneratedAnswer:
    """Scores a response with the verifier of its task's family.

    The answer is in the last <answer> tags, as the system prompts of reasoning-gym demand. Without
    tags it is the last number, if the task's answer is a number, else the whole response.
    """

    def score(self, episode: Any) -> float:
        """0 to 1. Raises TaskFileError or KeyError for a task of another origin."""
        metadata = episode.task.metadata
        dataset, _, _ = _generator(metadata[FAMILY])
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(episode.text)
        if answer is None:
            numbers = _NUMBER.fullmatch(episode.task.answer) and _NUMBER.findall(episode.text)
            answer = numbers[-1] if numbers else episode.text.strip()
        return float(dataset.score_answer(answer, dataset[int(metadata[INDEX])]))
