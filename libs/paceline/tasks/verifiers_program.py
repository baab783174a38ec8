"""The program of a child that leads samples in an environment of the package verifiers.

It runs as a file under any Python that has verifiers, so it imports nothing of Paceline. Its one
argument is JSON: the environment's `id` and `args`, and either a `split` whose rows it prints, or
the gateway's `base_url`, `model` and certificate `authority`. Messages are lines of JSON on stdin
and stdout; text that the environment prints goes to stderr.

Samples arrive as {"key", "row", "sampling", "group", "size"}; key is the session's API key. An
answer repeats the key with "reward" and "parts", or with "fault" and "infra". {"rolled"} reports
before it that the model's turns are over. {"cancel": key} ends a sample. {"group", "size"} is the
number of siblings that are scored together.
"""

import asyncio
import json
import math
import os
import ssl
import sys
import threading
from collections import defaultdict
from typing import Any

ANSWER_S = 3600.0
"""Maximum seconds of one generation; the gateway bounds the silence of a session."""
MAX_TEXT = 2000
"""Maximum characters of a fault; the end is kept."""


def _causes(error: BaseException) -> list[BaseException]:
    """The error and its causes, outermost first."""
    found = [error]
    while len(found) < 8 and (cause := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(cause)
    return found


def _told(error: BaseException) -> str:
    told = [f"{type(one).__name__}: {one}".rstrip(": ") for one in _causes(error)]
    return ", caused by ".join(told)[-MAX_TEXT:]


def _is_infra(error: BaseException) -> bool:
    """Whether the gateway was away or full, so that the sample may run again."""
    import openai

    away = (openai.RateLimitError, openai.InternalServerError, openai.APIConnectionError)
    return any(isinstance(one, away) for one in _causes(error))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _print_rows(environment: Any, split: str, output: Any) -> None:
    """Print {"prompt", "answer", "row"} for each row of the environment's own dataset."""
    found = environment.get_eval_dataset() if split == "eval" else environment.get_dataset()
    for row in found:
        prompt = row["prompt"]
        last = prompt[-1]["content"] if prompt and isinstance(prompt, list) else prompt
        told = {"prompt": _text(last), "answer": _text(row.get("answer")), "row": _text(row)}
        print(json.dumps(told), file=output)


class _Group:
    """Siblings that have been rolled out and wait to be scored together."""

    def __init__(self) -> None:
        self.size = 0
        self.states: dict[str, Any] = {}  # by key
        self.scoring = asyncio.get_running_loop().create_future()  # an asyncio task


class Leader:
    """Leads the samples of one environment."""

    def __init__(self, environment: Any, order: dict[str, Any], answers: Any) -> None:
        import openai

        self._environment, self._order, self._answers = environment, order, answers
        scores = environment.score_rollouts
        self.grouped = bool(scores and getattr(environment, "requires_group_rollouts", False))
        authority = ssl.create_default_context(cafile=order["authority"] or None)
        self._http = openai.DefaultAsyncHttpxClient(
            timeout=ANSWER_S,
            verify=authority,
            trust_env=False,  # the gateway is on this machine
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._groups: defaultdict[str, _Group] = defaultdict(_Group)

    def tell(self, **message: Any) -> None:
        """Send one message to the gateway."""
        print(json.dumps(message, default=float), file=self._answers, flush=True)

    def take(self, message: dict[str, Any]) -> None:
        """Handle one message of the gateway."""
        if "cancel" in message:
            if (task := self._tasks.get(message["cancel"])) is not None:
                task.cancel()
            return
        if self.grouped:
            self._groups[message["group"]].size = message["size"]
            self._score_whole(message["group"])
        if "key" in message:
            key = message["key"]
            self._tasks[key] = asyncio.create_task(self._answer(message))
            self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _answer(self, sample: dict[str, Any]) -> None:
        key = sample["key"]
        try:
            state = await self._lead(sample)
            parts = {k: one for k, one in (state.get("metrics") or {}).items() if _is_number(one)}
            self.tell(key=key, reward=state.get("reward"), parts=parts)
        except BaseException as error:  # noqa: BLE001  an environment may raise anything
            self.tell(key=key, fault=_told(error), infra=_is_infra(error))

    async def _lead(self, sample: dict[str, Any]) -> Any:
        """The state of a sample, with its reward if the environment scores samples."""
        environment = self._environment
        sampling = {**environment.sampling_args, **sample["sampling"]}
        client, model = self._client(sample["key"]), self._order["model"]
        state = await environment.rollout(sample["row"], client, model, sampling)
        self.tell(key=sample["key"], rolled=True)
        if (error := state.get("error")) is not None:
            raise error
        if self.grouped:
            await self._scored_with_siblings(sample["group"], sample["key"], state)
        elif environment.score_rollouts:
            await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        return state

    def _client(self, key: str) -> Any:
        """verifiers' client of one session; all share one pool of connections."""
        import openai
        from verifiers import clients

        opened = openai.AsyncOpenAI(
            base_url=self._order["base_url"], api_key=key, http_client=self._http, max_retries=5
        )
        plain = getattr(self._environment, "message_type", "chat") == "completion"
        kind = clients.OpenAICompletionsClient if plain else clients.OpenAIChatCompletionsClient
        return kind(opened)

    async def _scored_with_siblings(self, name: str, key: str, state: Any) -> None:
        group = self._groups[name]
        group.states[key] = state
        self._score_whole(name)
        try:
            await asyncio.shield(await asyncio.shield(group.scoring))
        finally:
            group.states.pop(key, None)

    def _score_whole(self, name: str) -> None:
        """Score a group once all its siblings wait, and forget it."""
        group = self._groups[name]
        if len(group.states) < group.size:
            return
        del self._groups[name]
        if group.states:
            scored = self._environment.rubric.score_group([*group.states.values()])
            group.scoring.set_result(asyncio.create_task(scored))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


async def _serve(leader: Leader, requests: Any) -> None:
    """Lead samples until the gateway closes the pipe. A thread reads it, so that the process ends
    with the gateway even while an environment blocks the event loop.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(leader.take, json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    leader.tell(grouped=leader.grouped)
    await loop.create_future()


def main() -> None:
    """Print the rows of a split, or lead samples."""
    sys.path[0] = os.getcwd()  # in place of this file's directory, whose modules are others
    order = json.loads(sys.argv[1])
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        import verifiers

        environment = verifiers.load_environment(order["id"], **order["args"])
        if "split" in order:
            _print_rows(environment, order["split"], answers)
            answers.flush()
            os._exit(0)  # the environment's exit handlers may wait
        leader = Leader(environment, order, answers)
    except BaseException as error:  # noqa: BLE001  an environment may raise anything
        print(json.dumps({"refused": _told(error)}), file=answers, flush=True)
        os._exit(1)
    asyncio.run(_serve(leader, requests))


if __name__ == "__main__":
    main()
