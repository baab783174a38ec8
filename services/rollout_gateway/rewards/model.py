"""Batches episodes for a reward model, which runs in its own process.

That process alone imports rewards/reward_model.py, and torch. remote.py handles a reward model at a
URL.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from paceline.errors import Unavailable
from paceline.services.rollout_gateway import environments, rewards
from paceline.services.rollout_gateway.background import background
from paceline.services.rollout_gateway.config import ModelRewardConfig
from paceline.services.rollout_gateway.rewards import child, child_program

MODEL = "paceline.services.rollout_gateway.rewards.reward_model:RewardModel"
LOAD_S = 600.0
"""Maximum seconds to load a model."""
Waiting = tuple[environments.Episode, asyncio.Future[float | None]]


class ModelReward(rewards.RewardRule):
    """Runs one batch at a time; episodes that arrive meanwhile form the next batch."""

    def __init__(self, config: ModelRewardConfig) -> None:
        self._config = config
        self._waiting: deque[Waiting] = deque()
        self._batches: asyncio.Task[None] | None = None
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
        answer: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, answer))
        if self._batches is None or self._batches.done():
            self._batches = background(self._run_batches(), "the reward model's batches")
        return await answer

    async def close(self) -> None:
        """End the process; waiting callers get Unavailable."""
        await self._place.close()
        if self._batches is not None:
            await self._batches

    async def _run_batches(self) -> None:
        """Score batches until no episode waits."""
        while self._waiting:
            count = min(len(self._waiting), self._config.max_batch)
            waiting = [self._waiting.popleft() for _ in range(count)]
            batch = [one for one in waiting if not one[1].done()]  # else its caller has gone
            values = await self._score([episode for episode, _ in batch])
            for (_, answer), value in zip(batch, values, strict=True):
                if answer.done():
                    continue
                if isinstance(value, Exception):
                    answer.set_exception(value)
                else:
                    answer.set_result(value)

    async def _score(
        self, episodes: Sequence[environments.Episode]
    ) -> Sequence[float | Exception | None]:
        failure: Exception
        try:
            answer = await self._place.score(self._model, episodes, self._config.deadline_s)
            if isinstance(answer, child_program.Rewards):
                both = zip(episodes, answer.values, strict=True)
                return [_value(one) for _, one in both]
            failure = Unavailable("the reward model failed", seen=answer.text)
        except rewards.Unscored as error:
            failure = Unavailable("the reward model took too long", seen=error)
        except Exception as error:  # noqa: BLE001 - every waiting caller gets the error
            failure = error
        return [failure] * len(episodes)


def _value(given: float | child_program.Raised | None) -> float | Exception | None:
    if isinstance(given, child_program.Raised):
        return rewards.Unscored("exception", given.text)
    return given
