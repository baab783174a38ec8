"""The program of a child that leads samples in an environment of the package verifiers.

It runs as a file under any Python that has verifiers. Of Paceline it uses the agents' client, which
needs the package openai alone. Its one argument is JSON: the environment's `id` and `args`, and
either the method `rows` whose dataset it prints, or the gateway's `base_url`, `model` and
certificate `authority`. Messages are lines of JSON on stdin and stdout; text that the environment
prints goes to stderr.

A sample arrives as {"key", "group", "row", "sampling"}; the key is its session's. The child reports
[key, "rolled"] when the model's turns are over, or [key, "waits"] for its siblings, and
[key, "left"] at the end. Siblings are scored together when as many wait as {"group", "size"} has.
{"cancel": key} ends a sample.
"""

import asyncio
import json
import math
import os
import ssl
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ANSWER_S = 3600.0
"""Maximum seconds of one generation; the gateway bounds the silence of a session."""


class Leader:
    """Leads the samples of one environment."""

    def __init__(self, environment: Any, order: dict[str, Any], tell: Any) -> None:
        """`tell`: sends one message to the gateway."""
        from verifiers import clients

        from paceline.client import AsyncClient

        self._environment, self._model, self._tell = environment, order["model"], tell
        kind = "" if environment.message_type == "completion" else "Chat"
        self._client = getattr(clients, f"OpenAI{kind}CompletionsClient")
        authority = ssl.create_default_context(cafile=order["authority"] or None)
        self._gateway = AsyncClient(order["base_url"], "", verify=authority, trust_env=False)
        self._samples: dict[str, asyncio.Task[None]] = {}  # by key
        # by group: the states that wait for siblings, by key, and their scoring
        self._waiting: dict[str, tuple[dict[str, Any], asyncio.Future[Any]]] = {}

    async def serve(self, requests: Any) -> None:
        """Lead samples until the gateway closes the pipe."""
        from paceline.local.processes import MAX_LINE_BYTES

        reader = asyncio.StreamReader(MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, requests)
        self._tell({})
        async for line in reader:
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        """Handle one message of the gateway."""
        group = message.get("group", "")
        if "row" in message:
            self._samples[message["key"]] = asyncio.create_task(self._lead(**message))
        elif cancelled := self._samples.pop(message.get("cancel", ""), None):
            cancelled.cancel()
        elif group in self._waiting and len(self._waiting[group][0]) >= message["size"]:
            states, scoring = self._waiting.pop(group)
            score = self._environment.rubric.score_group([*states.values()])
            scoring.set_result(asyncio.create_task(score))

    async def _lead(self, key: str, group: str, row: Any, sampling: dict[str, Any]) -> None:
        """Lead a sample. Its session is completed with its rewards, or failed by an error."""
        async with self._gateway.attach(key) as session:
            try:
                await self._reward(session, group, row, sampling)
            except (SystemExit, asyncio.CancelledError) as error:  # an exit would end the child
                raise RuntimeError(f"the rollout ended by {error!r}") from error
            finally:
                self._waiting.get(group, ({},))[0].pop(key, None)
                self._samples.pop(key, None)
                self._tell([key, "left"])

    async def _reward(self, session: Any, group: str, row: Any, sampling: dict[str, Any]) -> None:
        """Roll a sample out, have the rubric score it, and post the rewards: those of single turns,
        and to the session the rest.
        """
        if row is None:
            raise ValueError("the task is no row of the environment; see coordinator.tasks_path")
        environment, key = self._environment, session.api_key
        client = self._client(session.openai.with_options(timeout=ANSWER_S))
        sampling = {**environment.sampling_args, **sampling}
        state = await environment.rollout(row, client, self._model, sampling)
        if (error := state.get("error")) is not None:
            raise error
        for turn in state["trajectory"]:  # a rubric of groups would repeat the sample's reward
            turn["reward"] = turn.get("reward") or 0.0
        grouped = environment.score_rollouts and environment.requires_group_rollouts
        self._tell([key, "waits" if grouped else "rolled"])
        if grouped:
            states, scoring = self._waiting.setdefault(group, ({}, asyncio.Future()))
            states[key] = state
            await asyncio.shield(await asyncio.shield(scoring))
        elif environment.score_rollouts:
            await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        info, rest = await session.info(), state.get("reward")
        if rest is None or not info.turns:
            fault = "returned no reward" if rest is None else "ended without a turn of the model"
            raise ValueError(f"the environment {fault}")
        for turn in state["trajectory"] if info.trainable else ():
            if turn["reward"]:
                await session.reward(turn["reward"], completion=turn["response"].id)
                rest -= turn["reward"]
        metrics = (state.get("metrics") or {}).items()
        parts = {k: v for k, v in metrics if isinstance(v, int | float) and math.isfinite(v)}
        await session.reward(rest, parts=parts)


def main() -> None:
    """Print the rows of a dataset, or lead samples."""
    sys.path[0] = os.getcwd()  # in place of this file's directory, whose modules are others
    sys.modules["paceline"] = ModuleType("paceline")  # without the packages beside it
    sys.modules["paceline"].__path__ = [str(Path(__file__).parents[1])]
    from paceline.local.processes import reserve_pipes

    order, (requests, answers) = json.loads(sys.argv[1]), reserve_pipes()

    def tell(message: object) -> None:
        answers.write(json.dumps(message, default=str).encode() + b"\n")
        answers.flush()

    try:
        import verifiers

        environment = verifiers.load_environment(order["id"], **order["args"])
        if "rows" not in order:
            asyncio.run(Leader(environment, order, tell).serve(requests))
        else:
            for row in getattr(environment, order["rows"])():
                tell(row)
    except BaseException as error:  # noqa: BLE001  an environment may raise anything
        tell({"refused": f"{type(error).__name__}: {error}"})
    os._exit(0)  # the environment's exit handlers may wait


if __name__ == "__main__":
    main()
