"""Environments of the package verifiers for tests: `verifiers:tiny_sums?kind=KIND`.

Each kind is built with the package's public classes over the same rows. The file is copied as a
module of its own name, because the package imports an environment by its module.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTIONS = ("throw", "Are you sure?", "count", "think about it")


def says(completion: Any, answer: str, **_: Any) -> float:
    """1 if the last message has the row's answer."""
    return 1.0 if completion and answer in str(completion[-1]["content"]) else 0.0


def brevity(completion: Any, **_: Any) -> float:
    return 1.0 / (1 + len(str(completion[-1]["content"]))) if completion else 0.0


def rank(completions: Any, **_: Any) -> list[float]:
    """Among siblings: the share of other answers that are longer."""
    sizes = [len(str(one[-1]["content"])) for one in completions]
    return [sum(size < other for other in sizes) + float(len(sizes)) for size in sizes]


def weather(city: str, days: float = 1.0) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Sure(vf.MultiTurnEnv):  # type: ignore[misc]
    """Asks once more."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "Are you sure?"}]


class Paid(Sure):
    """Rewards the first turn itself."""

    def __init__(self, again: str = "Are you sure?", **options: Any) -> None:
        super().__init__(max_turns=2, **options)
        self.again = again

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": self.again}]

    async def add_trajectory_step(self, state: Any, step: Any) -> None:
        if not state["trajectory"]:
            step["reward"] = 0.75
        await super().add_trajectory_step(state, step)


def paid(state: Any, **_: Any) -> float:
    """The sum of the turns' rewards, as in the package's own rubric of Gym environments."""
    return sum(float(turn["reward"] or 0.0) for turn in state["trajectory"])


class OnlyRight(Sure):
    """Raises after an answer that is not the row's."""

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        if not says(messages, state["answer"]):
            raise RuntimeError("the answer is wrong")
        return await super().env_response(messages, state, **options)


class Failing(vf.SingleTurnEnv):  # type: ignore[misc]
    """Fails on the row `count` in the way that its argument names."""

    def __init__(self, fault: str, **options: Any) -> None:
        super().__init__(**options)
        self.fault = fault

    async def setup_state(self, state: Any) -> Any:
        if state["answer"] == "one":
            if self.fault == "raises":
                raise RuntimeError("the world has ended")
            if self.fault == "cancels":
                raise asyncio.CancelledError("the world has ended")
            if self.fault == "exits":
                sys.exit("the world has ended")
            if self.fault == "hangs":
                await asyncio.sleep(3600)
            if self.fault == "blocks":
                threading.Event().wait()
            if self.fault == "dies":
                os._exit(7)
            if self.fault == "silent":
                state["final_env_response"] = [{"role": "user", "content": "over"}]
        return state


class NoReward(vf.Rubric):  # type: ignore[misc]
    async def score_rollout(self, state: Any) -> None:
        await super().score_rollout(state)
        if state["answer"] == "one":
            state["reward"] = None


def load_environment(kind: str = "single", fault: str = "") -> vf.Environment:
    answers = ("heads", "Yes", "one", "Four")
    rows = [
        {"prompt": [{"role": "user", "content": text}], "answer": answer}
        for text, answer in zip(QUESTIONS, answers, strict=True)
    ]
    print("text of an environment on stdout")
    if kind in ("gcd", "gcd_paid"):  # for the demo's policy, whose vocabulary is small
        pairs = ("273:077", "584:496", "120:090", "084:036")
        asked = [{"question": f"{one}=", "answer": one[-1]} for one in pairs]
        rubric = vf.Rubric(funcs=[says, brevity, paid], weights=[1.0, 0.5, 1.0])
        options = {
            "dataset": Dataset.from_list(asked),
            "eval_dataset": Dataset.from_list(asked[:3]),
            "rubric": rubric,
        }
        return vf.SingleTurnEnv(**options) if kind == "gcd" else Paid("273:077=", **options)
    data = {"dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:3])}
    rubric = vf.Rubric(funcs=[says, brevity], weights=[1.0, 0.5])
    if kind == "completion":
        asked = [{"prompt": "2+2=", "answer": "4"}]
        return vf.SingleTurnEnv(
            message_type="completion", dataset=Dataset.from_list(asked), rubric=rubric
        )
    if kind == "exits":
        sys.exit("the environment wants no rollout")
    if kind == "multi":
        return Sure(max_turns=2, rubric=rubric, **data)
    if kind == "tools":
        asked = [{"prompt": [{"role": "user", "content": "The weather in Oslo?"}], "answer": "wet"}]
        return vf.ToolEnv(
            tools=[weather], max_turns=3, dataset=Dataset.from_list(asked), rubric=rubric
        )
    if kind.startswith("paid"):
        rubric.add_reward_func(paid, weight=1.0)
    if kind in ("group", "survivors", "paid_group"):
        rubric.add_reward_func(rank, weight=1.0)
    if kind.startswith("paid"):
        return Paid(rubric=rubric, **data)
    if kind == "survivors":
        return OnlyRight(max_turns=2, rubric=rubric, **data)
    if kind == "failing":
        failing = Failing(fault, rubric=rubric, **data)
        if fault == "rewardless":
            failing.rubric = NoReward(funcs=[says])
        return failing
    return vf.SingleTurnEnv(rubric=rubric, **data)
