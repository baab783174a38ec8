"""The program of a child that leads samples in an environment of the package verifiers.

It runs as a file under any Python that has verifiers, so it imports nothing of Paceline. Its one
argument is JSON: the environment's `id` and `args`, and either a `split` whose rows it prints, or
the gateway's `base_url`, `model` and certificate `authority`. Messages are lines of JSON on stdin
and stdout; text that the environment prints goes to stderr.

Samples arrive as {"key", "row", "sampling", "group", "size"}; key is the session's API key. An
answer repeats the key with "reward" and "parts", or with "fault" and "infra". {"rolled"} reports
before it that the model's turns are over. {"cancel": key} and {"group", "size"} change work in
progress.
"""

import asyncio
import json
import math
import os
import ssl
import sys
import threading
from typing import Any

ANSWER_S = 3600.0
"""Maximum seconds of one generation; the gateway bounds the silence of a session."""
MAX_TEXT = 2000
"""Maximum characters of a fault; the end is kept."""


def _reserve_pipes() -> tuple[Any, Any]:
    """(requests, answers). Afterwards descriptor 0 is empty and descriptor 1 is stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, answers


def _told(error: BaseException) -> str:
    """The error with its causes, outermost first."""
    found: list[str] = []
    one: BaseException | None = error
    while one is not None and len(found) < 8:
        found.append(f"{type(one).__name__}: {one}".rstrip(": "))
        one = one.__cause__ or one.__context__
    return ", caused by ".join(found)[-MAX_TEXT:]


def _is_infra(error: BaseException) -> bool:
    """Whether the gateway was away or full, so that the sample may run again."""
    import openai

    one: BaseException | None = error
    while one is not None:
        busy = isinstance(one, openai.RateLimitError | openai.InternalServerError)
        if busy or isinstance(one, openai.APIConnectionError):
            return True
        one = one.__cause__ or one.__context__
    return False


def _load(order: dict[str, Any]) -> Any:
    """The environment. Raises any error of its code; ImportError without a usable verifiers."""
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "of unknown version")
        raise ImportError(f"verifiers {version} has no load_environment")
    return verifiers.load_environment(order["id"], **order["args"])


def _text_of(prompt: Any) -> str:
    """The text of the last message of a prompt."""
    content = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _rows(environment: Any, split: str) -> Any:
    """Yields {"prompt", "answer", "row"} for each row of the environment's own dataset."""
    found = environment.get_eval_dataset() if split == "eval" else environment.get_dataset()
    for row in found:
        answer = row.get("answer")
        text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        row_text = json.dumps(row, default=str)
        yield {"prompt": _text_of(row["prompt"]), "answer": text, "row": row_text}


class _Group:
    """Siblings that have been rolled out and wait to be scored together."""

    def __init__(self) -> None:
        self.size = 0
        self.waiting: dict[str, tuple[Any, asyncio.Future[None]]] = {}  # by key


class Leader:
    """Leads the samples of one environment."""

    def __init__(self, environment: Any, order: dict[str, Any], answers: Any) -> None:
        import openai

        self._environment, self._order, self._answers = environment, order, answers
        self.grouped = bool(getattr(environment, "requires_group_rollouts", False))
        authority = ssl.create_default_context(cafile=order["authority"] or None)
        self._http = openai.DefaultAsyncHttpxClient(
            timeout=ANSWER_S,
            verify=authority,
            trust_env=False,  # the gateway is on this machine
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._groups: dict[str, _Group] = {}

    def tell(self, **message: Any) -> None:
        """Send one message to the gateway."""
        print(json.dumps(message), file=self._answers, flush=True)

    def take(self, message: dict[str, Any]) -> None:
        """Handle one message of the gateway."""
        if "cancel" in message:
            if (task := self._tasks.get(message["cancel"])) is not None:
                task.cancel()
        elif "key" in message:
            key = message["key"]
            self._tasks[key] = asyncio.create_task(self._answer(message))
            self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))
        elif (group := self._groups.get(message["group"])) is not None:
            group.size = message["size"]
            self._score_whole(message["group"], group)

    async def _answer(self, sample: dict[str, Any]) -> None:
        key = sample["key"]
        try:
            reward, metrics = await self._lead(sample)
            parts = {name: float(one) for name, one in metrics.items() if _is_number(one)}
            self.tell(key=key, reward=None if reward is None else float(reward), parts=parts)
        except asyncio.CancelledError:
            self.tell(key=key, fault="cancelled", infra=True)
        except BaseException as error:  # noqa: BLE001  an environment may raise anything
            self.tell(key=key, fault=_told(error), infra=_is_infra(error))

    async def _lead(self, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        environment = self._environment
        sampling = {**environment.sampling_args, **sample["sampling"]}
        client, model = self._client(sample["key"]), self._order["model"]
        state = await environment.rollout(sample["row"], client, model, sampling)
        self.tell(key=sample["key"], rolled=True)
        if (error := state.get("error")) is not None:
            raise error if isinstance(error, BaseException) else RuntimeError(str(error))
        if not environment.score_rollouts:
            raise RuntimeError("the environment has score_rollouts=False, so it has no reward")
        if self.grouped:
            await self._scored_with_siblings(sample, state)
        else:
            await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        return state.get("reward"), state.get("metrics") or {}

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

    async def _scored_with_siblings(self, sample: dict[str, Any], state: Any) -> None:
        name, key = sample["group"], sample["key"]
        group = self._groups.setdefault(name, _Group())
        group.size = sample["size"]
        scored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.waiting[key] = state, scored
        self._score_whole(name, group)
        try:
            await scored
        finally:
            group.waiting.pop(key, None)

    def _score_whole(self, name: str, group: _Group) -> None:
        """Score a group once all its siblings wait."""
        if group.waiting and len(group.waiting) >= group.size:
            self._groups.pop(name, None)
            task = asyncio.create_task(self._score_group([*group.waiting.values()]))
            self._tasks[f"group {name}"] = task
            task.add_done_callback(lambda _: self._tasks.pop(f"group {name}", None))

    async def _score_group(self, siblings: list[tuple[Any, asyncio.Future[None]]]) -> None:
        try:
            await self._environment.rubric.score_group([state for state, _ in siblings])
            fault = None
        except Exception as error:  # noqa: BLE001  a rubric may raise anything
            fault = error
        for _, scored in siblings:
            if not scored.done():
                scored.set_result(None) if fault is None else scored.set_exception(fault)


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
    leader.tell(ready=True, grouped=leader.grouped)
    await loop.create_future()


def main() -> None:
    """Print the rows of a split, or lead samples."""
    sys.path[0] = os.getcwd()  # in place of this file's directory, whose modules are others
    order = json.loads(sys.argv[1])
    requests, answers = _reserve_pipes()
    try:
        environment = _load(order)
        if "split" in order:
            for row in _rows(environment, order["split"]):
                print(json.dumps(row), file=answers)
            answers.flush()
            os._exit(0)  # the environment's exit handlers may wait
        leader = Leader(environment, order, answers)
    except BaseException as error:  # noqa: BLE001  an environment may raise anything
        missing = isinstance(error, ImportError)
        print(json.dumps({"refused": _told(error), "missing": missing}), file=answers, flush=True)
        os._exit(1)
    asyncio.run(_serve(leader, requests))


if __name__ == "__main__":
    main()
