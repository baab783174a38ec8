"""A session: its `openai` client, rewards, training data and end, blocking and under asyncio."""

import math
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar
from urllib.parse import quote

import pydantic
from openai import APIError, AsyncOpenAI, OpenAI

from paceline import errors
from paceline.client import calls, traces

COMPLETE_S = 600.0
"""Time-out of `complete`: a task of the run is scored by its rule before the answer."""
CLOSING_S = 5.0
"""Time-out for ending a session when an exception leaves its block."""
MESSAGE_CHARACTERS = 500
ENDED = "SESSION_ENDED"
_INFRA = (
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.InternalError,
    errors.ResourceExhausted,
    errors.DataLoss,
    OSError,
)
Info = TypeVar("Info")
Samples = TypeVar("Samples")
Tree = TypeVar("Tree")
Span = tuple[Any, ...]


class Task(pydantic.BaseModel, frozen=True):
    """A task of a training run that this session attempts."""

    id: str
    prompt: str
    metadata: Mapping[str, str] = {}


class SessionInfo(pydantic.BaseModel, frozen=True):
    """The gateway's record of a session."""

    id: str
    state: Literal["open", "final", "unscored", "aborted", "failed"]
    task_id: str = ""
    group_id: str = ""
    group_size: int = 1
    sample_index: int = 0
    trainable: bool = True
    reward: float | None = None  # None: not scored, which is not 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    fail_reason: str | None = None


class Opened(pydantic.BaseModel, frozen=True):
    """A session for its opener; the only answer with the key."""

    id: str
    api_key: str = pydantic.Field(repr=False)
    group_id: str = ""
    task: Task | None = None


class Sample(pydantic.BaseModel, frozen=True):
    """One training sample of a session, T tokens."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]  # [T] 1 for a token drawn by the model
    behavior_logprobs: tuple[float, ...]  # [T] 0.0 for other tokens
    version_spans: tuple[Span, ...] = ()  # policy versions of the tokens, in the gateway's form
    draw_spans: tuple[Span, ...] = ()  # start, end, arm, number format
    reward: float | None = None


class _Samples(pydantic.BaseModel):
    samples: tuple[Sample, ...]


class SessionCalls(Generic[Info, Samples, Tree]):
    """The calls of a session. `Session` returns their results, `AsyncSession` awaitables."""

    _call: Callable[..., Any]

    def __init__(self, client: Any, opened: Opened) -> None:
        """`client`: an `openai` client of the gateway."""
        self.id, self.group_id, self.task = opened.id, opened.group_id, opened.task
        self.api_key = opened.api_key
        """Generations under this key belong to this session. It permits nothing else."""
        self.ended = False
        """True when this object has ended the session."""
        self._client = client.with_options(api_key=opened.api_key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, ended={self.ended})"

    @property
    def base_url(self) -> str:
        """Base URL for another OpenAI client; ends in /v1."""
        return str(self._client.base_url).rstrip("/")

    def openai_options(self) -> dict[str, Any]:
        """Keyword arguments for `openai.OpenAI` or `openai.AsyncOpenAI`. Each request carries the
        trace of the span that is current when it is sent.

        Contains the key: do not log it.
        """
        headers = traces.TraceHeaders()
        return {"api_key": self.api_key, "base_url": self.base_url, "default_headers": headers}

    def reward(
        self,
        value: float,
        *,
        completion: str | None = None,
        accumulate: bool = False,
        parts: Mapping[str, float] | None = None,
    ) -> Info:
        """Sets the reward of the session, or of the turn with this completion id; with
        `accumulate`, adds to it. `parts`: of a session's reward, by name, for the run's records.

        A repeated call counts once. Raises FailedPrecondition when another reward is already set.
        """
        body = reward_body(value, completion, accumulate) | calls.given(parts=parts)
        return self._call(self._client, self._path("/reward"), calls.reader(SessionInfo), body)

    def info(self) -> Info:
        """State of the session."""
        return self._call(self._client, self._path(), calls.reader(SessionInfo), None)

    def samples(self) -> Samples:
        """The session's training data so far, also after its end."""
        read = calls.reader(_Samples)
        path = self._path("/export?form=samples")
        return self._call(self._client, path, lambda text: read(text).samples, None)

    def tree(self) -> Tree:
        """The message tree: JSON with each turn's tokens, log-probs, versions and reward."""
        return self._call(
            self._client, self._path("/export?form=tree"), calls.reader(dict[str, Any]), None
        )

    def complete(self, reward: float | None = None) -> Info:
        """Ends the session: "final" with a reward, "unscored" without."""
        return self._end("/complete", calls.given(reward=reward), timeout=COMPLETE_S)

    def abort(self) -> Info:
        """Ends the session; none of its tokens are trained."""
        return self._end("/abort", {})

    def fail(self, reason: Literal["infra", "data"], message: str = "") -> Info:
        """Ends a session that could not be completed: "infra", or "data" when the task itself is at
        fault.
        """
        return self._end("/fail", {"reason": reason, "message": message[:MESSAGE_CHARACTERS]})

    def _path(self, rest: str = "") -> str:
        return f"/sessions/{quote(self.id, safe='')}{rest}"

    def _end(self, action: str, body: dict[str, Any], **options: Any) -> Info:
        def read(text: str) -> SessionInfo:
            info, self.ended = calls.reader(SessionInfo)(text), True
            return info

        return self._call(self._client, self._path(action), read, body, **options)

    def _left_by(self, error: BaseException | None) -> Callable[[], Info] | None:
        """The call that ends the session when its block is left; None when it has ended."""
        if self.ended or _reason(error) == ENDED:
            return None
        if error is None:
            return self.complete
        end = partial(self._end, timeout=CLOSING_S, max_retries=0)
        # KeyboardInterrupt, CancelledError and SystemExit are no fault of the session.
        if not isinstance(error, Exception):
            if self.task is None:
                return partial(end, "/abort", {})
            reason, message = "infra", type(error).__name__  # another agent may claim the task
        else:
            reason = "infra" if any(map(_is_infra, _causes(error))) else "data"
            told = (f"{type(one).__name__}: {one}".rstrip(": ") for one in _causes(error))
            message = ", caused by ".join(told)[:MESSAGE_CHARACTERS]
        return partial(end, "/fail", {"reason": reason, "message": message})

    @contextmanager
    def _noted(self, error: BaseException | None) -> Iterator[None]:
        """A failure to end the session is a note of the error that left its block."""
        try:
            yield
        except errors.PacelineError as failure:
            if error is None:
                raise
            error.add_note(f"session {self.id} could not be ended and will time out: {failure}")


class Session(SessionCalls[SessionInfo, tuple[Sample, ...], dict[str, Any]]):
    """One attempt at one task; created by a client's `session`, `claim` and `tasks`.

    As a context manager it ends the session at the end of its block. A normal exit calls
    `complete`. KeyboardInterrupt, cancellation and similar exits call `abort`. An exception calls
    `fail`: "infra" for faults of the network or the gateway, else "data". Exceptions propagate to
    the caller. A session without a reward ends "unscored", which is not reward 0.

    Raises the errors listed at `Client`. Threads, or the tasks of one event loop, may share it.
    """

    _call = staticmethod(calls.call)

    @property
    def openai(self) -> OpenAI:
        """A client with the session's key; generate with it."""
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._noted(error):
            if (end := self._left_by(error)) is not None:
                end()


class AsyncSession(
    SessionCalls[Awaitable[SessionInfo], Awaitable[tuple[Sample, ...]], Awaitable[dict[str, Any]]]
):
    """`Session` for asyncio: its calls are awaited, its block is `async with`."""

    _call = staticmethod(calls.async_call)

    @property
    def openai(self) -> AsyncOpenAI:
        """A client with the session's key; generate with it."""
        return self._client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._noted(error):
            if (end := self._left_by(error)) is not None:
                await end()


def reward_body(value: float, completion: str | None, accumulate: bool) -> dict[str, Any]:
    """A reward with an idempotency key, which all attempts of one call share. Raises InvalidInput
    for a value that is not finite.
    """
    if not math.isfinite(value):
        raise errors.InvalidInput("a reward is a finite number", seen=value)
    key = uuid.uuid4().hex
    return calls.given(
        value=float(value), completion_id=completion, accumulate=accumulate, idempotency_key=key
    )


def _reason(error: BaseException | None) -> str:
    error = calls.error_of(error) if isinstance(error, APIError) else error
    return error.reason if isinstance(error, errors.PacelineError) else ""


def _is_infra(error: BaseException) -> bool:
    error = calls.error_of(error) if isinstance(error, APIError) else error
    # The transport errors of httpx, whichever version the agent uses.
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, _INFRA) or "TransportError" in names


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the members of groups."""
    waiting: dict[int, BaseException] = {id(error): error}
    seen: set[int] = set()
    while waiting:
        number, one = waiting.popitem()
        seen.add(number)
        yield one
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        further = [*members, *([] if one.__cause__ is None else [one.__cause__])]
        waiting |= {id(other): other for other in further if id(other) not in seen}
