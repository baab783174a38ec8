"""Opens sessions at a gateway, blocking and under asyncio."""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote, urlsplit

from openai import AsyncOpenAI, OpenAI

from paceline.addresses import direct
from paceline.client import calls, traces
from paceline.client.session import AsyncSession, Opened, Session, SessionInfo, reward_body
from paceline.errors import DeadlineExceeded, InvalidInput, Unavailable
from paceline.local.tokens import token_at

TOKEN_VARIABLES = ("PACELINE_AGENT_TOKEN", "PACELINE_TOKEN")
TIMEOUT_S = 30.0
MAX_RETRIES = 5
LONG_POLL_S = 30.0
PAUSE_S = 1.0
"""Shortest time between two claims of `tasks`."""
S = TypeVar("S")
OpenedSession = TypeVar("OpenedSession")
Claimed = TypeVar("Claimed")
Info = TypeVar("Info")


class ClientCalls(Generic[S, OpenedSession, Claimed, Info]):
    """The calls of a client. `Client` returns results, `AsyncClient` returns awaitables.

    `token` is the gateway's; None uses the result of `find_token`. `verify` sets the
    trusted authorities of TLS; a context may hold a client certificate. `trust_env` False ignores
    the variables for proxies, as for every loopback address. As in the `openai` package,
    `timeout_s` limits an attempt and `max_retries` a call. Generations keep that package's
    time-out.
    """

    _call: Callable[..., Any]
    _kind: Callable[[Any, Opened], S]

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        verify: bool | ssl.SSLContext = True,
        trust_env: bool = True,
    ) -> None:
        self._url, self._token, self._timeout_s = _root(base_url), token, timeout_s
        if token and not (token.isascii() and token.isprintable()):
            raise InvalidInput("the token does not fit a header", allowed="printable ASCII")
        options = direct(self._url, verify) | ({} if trust_env else {"trust_env": False})
        self._client = self._connect(
            options,
            api_key="none",
            base_url=f"{self._url}/v1",
            max_retries=max_retries,
            default_headers=traces.TraceHeaders(),
        )

    def _connect(self, http: dict[str, Any], **options: Any) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def session(
        self,
        task: str | None = None,
        *,
        group: str | None = None,
        group_size: int | None = None,
        sample_index: int | None = None,
        trainable: bool | None = None,
        turn_discount: float | None = None,
        timeout_s: float | None = None,
        override_sampling: bool | None = None,
    ) -> OpenedSession:
        """Opens a session.

        After `timeout_s` of silence the gateway ends the session. If the answer to the opening is
        lost, another session is opened. The first then ends by that time-out, without turns and so
        without training data. `override_sampling`: True uses the run's sampling when the requested
        sampling cannot be trained, False refuses such requests, None uses the gateway's setting.
        """
        about = calls.given(
            task_id=task,
            group_id=group,
            group_size=group_size,
            sample_index=sample_index,
            trainable=trainable,
            turn_discount=turn_discount,
            timeout_s=timeout_s,
            override_sampling=override_sampling,
        )
        return self._ask("/sessions", self._opened, about)

    def attach(self, api_key: str) -> S:
        """The session of this key, e.g. in a process that received `openai_options()`. Makes no
        call.
        """
        return self._kind(self._client, Opened(id="current", api_key=api_key))

    def claim(
        self,
        wait_s: float = LONG_POLL_S,
        *,
        session_timeout_s: float | None = None,
        override_sampling: bool | None = None,
        **options: Any,
    ) -> Claimed:
        """A session for the next task of the training run; None if none arrives within `wait_s`."""
        about = calls.given(timeout_s=session_timeout_s, override_sampling=override_sampling)
        body = {"claim": True, "wait_s": wait_s, **about}
        options = {"timeout": self._timeout_s + wait_s, **options}
        return self._ask("/sessions", self._opened, body, **options)

    def session_info(self, session_id: str) -> Info:
        """State of any session; needs the gateway's token."""
        return self._ask(f"/sessions/{quote(session_id, safe='')}", calls.reader(SessionInfo), None)

    def reward(self, completion: str, value: float, *, accumulate: bool = False) -> Info:
        """Rewards a turn by its completion's id alone, and returns the turn's session."""
        body = reward_body(value, completion, accumulate)
        return self._ask("/rewards", calls.reader(SessionInfo), body)

    def _gateway(self) -> Any:
        # The run may begin, and create its token, after the agent.
        token = find_token(self._url) if self._token is None else self._token
        return self._client.with_options(api_key=token or "none")

    def _ask(self, path: str, read: calls.Read[Any], body: Any, **options: Any) -> Any:
        options = {"timeout": self._timeout_s, **options}
        return self._call(self._gateway(), path, read, body, **options)

    def _opened(self, text: str) -> S | None:
        return self._kind(self._client, calls.reader(Opened)(text)) if text else None


class Client(ClientCalls[Session, Session, Session | None, SessionInfo]):
    """A gateway's client. One client per process is enough; threads may share it.

    Calls raise errors of `paceline.errors`: InvalidInput (UNAUTHENTICATED for a wrong key),
    NotFound, FailedPrecondition (SESSION_ENDED, ...), ResourceExhausted, Unavailable,
    InternalError, DeadlineExceeded, DataLoss. Generations raise the errors of `openai`.
    """

    _call = staticmethod(calls.call)
    _kind = Session

    @property
    def openai(self) -> OpenAI:
        """A client with the gateway's token."""
        return self._gateway()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections. Sessions stay open."""
        self._client.close()

    def tasks(self, timeout_s: float = 600.0, **options: Any) -> Iterator[Session]:
        """Sessions for the tasks of the training run, until none arrives for `timeout_s`, for
        example at the end of the run. `options` are those of `claim`.

        The caller ends each session: by its block in the loop, or in the thread or task that
        receives it. Raises Unavailable if the gateway never answers.
        """
        search = _Search(timeout_s)
        while (wait_s := search.wait_s()) > 0:
            session = None
            with search.attempt():
                session = self.claim(wait_s, max_retries=0, **options)
            if session is None:
                time.sleep(search.pause_s())
            else:
                yield session
                search.restart()

    def _connect(self, http: dict[str, Any], **options: Any) -> OpenAI:
        own = calls.HttpClient(**http, follow_redirects=False)
        return OpenAI(http_client=own, **options)


class AsyncClient(
    ClientCalls[
        AsyncSession,
        Awaitable[AsyncSession],
        Awaitable[AsyncSession | None],
        Awaitable[SessionInfo],
    ]
):
    """`Client` for asyncio: its calls are awaited. It belongs to the event loop of its first call,
    and tasks of that loop may share it.
    """

    _call = staticmethod(calls.async_call)
    _kind = AsyncSession

    @property
    def openai(self) -> AsyncOpenAI:
        """A client with the gateway's token."""
        return self._gateway()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections. Sessions stay open."""
        await self._client.close()

    async def tasks(self, timeout_s: float = 600.0, **options: Any) -> AsyncIterator[AsyncSession]:
        """As `Client.tasks`."""
        search = _Search(timeout_s)
        while (wait_s := search.wait_s()) > 0:
            session = None
            with search.attempt():
                session = await self.claim(wait_s, max_retries=0, **options)
            if session is None:
                await asyncio.sleep(search.pause_s())
            else:
                yield session
                search.restart()

    def _connect(self, http: dict[str, Any], **options: Any) -> AsyncOpenAI:
        own = calls.AsyncHttpClient(**http, follow_redirects=False)
        return AsyncOpenAI(http_client=own, **options)


class _Search:
    """The claims of `tasks` until no task arrives for `timeout_s`.

    If a gateway that has answered is away, its run has ended or it is restarting: there is no task.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._answered, self._began = timeout_s, False, 0.0
        self.restart()

    def restart(self) -> None:
        self._end = time.monotonic() + self._timeout_s

    def wait_s(self) -> float:
        """Longest wait of the next claim, in seconds; at most 0 at the end."""
        return min(LONG_POLL_S, self._end - time.monotonic())

    @contextmanager
    def attempt(self) -> Iterator[None]:
        self._began = time.monotonic()
        try:
            yield
            self._answered = True
        except (Unavailable, DeadlineExceeded):
            if not self._answered and self.wait_s() <= self.pause_s():
                raise

    def pause_s(self) -> float:
        """Seconds to wait after a claim without a task."""
        left_s = min(PAUSE_S, self._timeout_s) - (time.monotonic() - self._began)
        return max(left_s, 0.0)


def find_token(base_url: str) -> str:
    """The agents' token: from $PACELINE_AGENT_TOKEN, $PACELINE_TOKEN, or the run served there on
    this machine; "" without one.
    """
    given = (os.environ.get(name, "") for name in TOKEN_VARIABLES)
    return next(filter(None, given), "") or token_at(urlsplit(base_url).netloc)


def _root(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        well_formed = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or a broken IPv6 address
        well_formed = None
    if not well_formed or "@" in parts.netloc or parts.query or parts.fragment:
        seen = None if set(base_url) & set("@?#") else repr(base_url)  # the URL may hold a secret
        allowed = "http(s)://host[:port][/path]"
        raise InvalidInput("base_url is not valid", seen=seen, allowed=allowed)
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")
