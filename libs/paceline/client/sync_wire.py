"""Carries out flows with blocking calls. Owns the one httpx.Client; decides nothing."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import httpx

from paceline.client.answers import Json
from paceline.client.flows import Answer, Flow, Lost, Outcome, Pause, Send
from paceline.client.server_events import EventReader
from paceline.client.settings import Settings
from paceline.client.wire import TimeLeft, broken_off, cut_off, http_options, lost_by, within_bounds

T = TypeVar("T")


class SyncWire:
    """Safe to share between threads; a flow and a stream belong to the thread that runs them."""

    def __init__(self, settings: Settings, verify: bool | ssl.SSLContext) -> None:
        self._http = httpx.Client(**http_options(settings, verify))

    def run(self, flow: Flow[T]) -> T:
        """The flow's result. Raises what it raises."""
        return _carry_out(flow, self._whole)

    def events(self, flow: Flow[None]) -> Generator[Json]:
        """The events of the stream that the flow opens. Closing the generator ends the stream at
        the gateway.

        Raises Unavailable when the stream breaks off, DeadlineExceeded when its time is up,
        DataLoss.
        """
        with ExitStack() as held:
            opened: list[tuple[httpx.Response, float]] = []

            def begin(send: Send) -> Outcome:
                held.close()  # what an earlier attempt left
                end = time.monotonic() + send.left_s
                try:
                    response = held.enter_context(self._exchange(send, end))
                    if response.status_code == httpx.codes.OK:
                        opened.append((response, end))
                        return Answer(response.status_code, response.headers, b"")
                    return Answer(response.status_code, response.headers, _body(response))
                except httpx.RequestError as error:
                    return lost_by(error, late=time.monotonic() >= end)

            _carry_out(flow, begin)
            yield from _events(*opened[0])

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _whole(self, send: Send) -> Outcome:
        end = time.monotonic() + send.left_s
        try:
            with self._exchange(send, end) as response:
                answer = Answer(response.status_code, response.headers, _body(response))
        except httpx.RequestError as error:
            return lost_by(error, late=time.monotonic() >= end)
        if time.monotonic() >= end:  # cut, perhaps
            return Lost(
                sent=True,
                late=True,
                cause=httpx.ReadTimeout("the deadline passed while the answer came in"),
            )
        return answer

    @contextmanager
    def _exchange(self, send: Send, end: float) -> Iterator[httpx.Response]:
        """A response whose head has come and whose body ends by `end`."""
        timeout = {"timeout": TimeLeft(end)}
        headers = dict(send.headers)
        with (
            self._http.stream(
                send.method, send.path, headers=headers, content=send.content, extensions=timeout
            ) as response,
            cut_off(response, end),
        ):
            yield response


def _carry_out(flow: Flow[T], once: Callable[[Send], Outcome]) -> T:
    outcome: Outcome = None
    while True:
        try:
            step = flow.send(outcome)
        except StopIteration as ended:
            result: T = ended.value
            return result
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            outcome = None
        else:
            outcome = once(step)


def _body(response: httpx.Response) -> bytes:
    parts, size = [], 0
    for part in response.iter_bytes():
        size = within_bounds(size + len(part))
        parts.append(part)
    return b"".join(parts)


def _events(response: httpx.Response, end: float) -> Iterator[Json]:
    reader = EventReader()
    broken: Exception | None = None
    try:
        for piece in response.iter_bytes():
            yield from reader.feed(piece)
            if reader.done:
                return
    except httpx.RequestError as error:
        broken = error
    raise broken_off(broken, late=time.monotonic() >= end)
