"""Batches episodes for a reward model, which runs in its own process.

That process is rewards/reward_model.py; it alone imports torch. remote.py handles a reward model
at a URL.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, Unavailable
from paceline.services.rollout_gateway import environments, rewards
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import ModelRewardConfig
from paceline.services.rollout_gateway.rewards import child, child_program

MODEL = "paceline.services.rollout_gateway.rewards.reward_model:RewardModel"
LOAD_S = 600.0
"""Maximum seconds to load a model."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One episode and the future of its score."""

    episode: environments.Episode
    answer: asyncio.Future[float | None]


class ModelReward(rewards.RewardRule):
    """Runs one batch at a time; episodes that arrive meanwhile form the next batch."""

    def __init__(self, config: ModelRewardConfig) -> None:
        """Raises ConfigError when the directory is no checkpoint in safetensors."""
        check_directory(config.model)
        self._config = config
        self._waiting: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None
        settings = config.model_dump(include={"model", "threads", "max_tokens"})
        self._model = child_program.Load(MODEL, settings)
        self._place = child.ChildPlace(LOAD_S)

    @property
    def pids(self) -> list[int]:
        """Process id of the model, if it runs."""
        return self._place.pids

    async def prepare(self) -> None:
        """Load the model. Raises ConfigError when it is no reward model, Unavailable."""
        await self._place.score(self._model)

    async def score(self, episode: environments.Episode) -> float | None:
        """The model's scalar.

        Raises Unavailable when the model does not answer, Unscored when it cannot read a text.
        """
        if self._place.closed:
            raise Unavailable(child.STOPPED)
        one = _Waiting(episode, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._worker is None or self._worker.done():
            self._worker = background(self._work(), "the reward model's batches")
        return await one.answer

    async def close(self) -> None:
        """End the process; waiting callers get Unavailable."""
        await self._place.close()
        await cancel(self._worker)
        for one in self._waiting:
            _fail(one, Unavailable(child.STOPPED))

    async def _work(self) -> None:
        """Run batches until no episode waits."""
        while batch := self._next_batch():
            why: Exception = Unavailable(child.STOPPED)
            try:
                await self._score(batch)
            except Exception as error:  # noqa: BLE001 - every waiting caller gets the error
                why = error
            finally:
                for one in batch:
                    _fail(one, why)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._config.max_batch:
            one = self._waiting.popleft()
            if not one.answer.done():  # else its caller has gone
                batch.append(one)
        return batch

    async def _score(self, batch: list[_Waiting]) -> None:
        episodes = [one.episode for one in batch]
        try:
            answer = await self._place.score(self._model, episodes, self._config.deadline_s)
        except rewards.Unscored as error:
            raise Unavailable("the reward model took too long", seen=error) from error
        if isinstance(answer, child_program.Raised):
            raise Unavailable("the reward model failed", seen=answer.text)
        for one, given in zip(batch, answer.values, strict=True):
            if isinstance(given, child_program.Raised):
                _fail(one, rewards.Unscored("exception", given.text))
            elif not one.answer.done():
                one.answer.set_result(given)


def check_directory(model: str) -> None:
    """Raises ConfigError when a directory is no Hugging Face checkpoint, or only has pickled
    weights.
    """
    path = Path(model)
    allowed = "a Hugging Face directory with config.json, a tokenizer and *.safetensors"
    if not model or not (path / "config.json").is_file():
        raise ConfigError(
            "gateway.rewards.model.model is no checkpoint", seen=model or "nothing", allowed=allowed
        )

    if not any(path.glob("*.safetensors")):
        pickled = (file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        found = ", ".join(sorted(pickled))
        raise ConfigError(
            "gateway.rewards.model.model has no safetensors; pickled weights are not loaded, they "
            "can run code",
            seen=found or path,
            allowed=allowed,
        )


def _fail(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
