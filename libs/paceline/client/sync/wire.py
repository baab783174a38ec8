# Generated from paceline/client/aio by .ci/client. Do not edit: `make client`.
"""Runs flows over the single httpx.AsyncClient of a client."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import httpx

from paceline.client.answers import Json
from paceline.client.calls import GatewayCall
from paceline.client.exchange import (
    broken_off,
    exchange,
    http_options,
    lost_by,
    until,
    within_bounds,
)
from paceline.client.flows import Flow, HttpAnswer, Lost, Outcome, Pause, Send, ask, opening
from paceline.client.server_events import EventReader
from paceline.client.settings import ClientSettings

T = TypeVar("T")


class SyncWire:
    """Shared by a client and its sessions. A flow or a stream belongs to its caller."""

    def __init__(self, settings: ClientSettings, verify: bool | ssl.SSLContext) -> None:
        self.settings = settings
        self._http = httpx.Client(**http_options(settings, verify))

    def ask(self, call: GatewayCall[T]) -> T:
        """The call's result. Raises as `flows.ask`."""
        return self.run(ask(call, self.settings))

    def run(self, flow: Flow[T]) -> T:
        """The flow's result. Raises the flow's errors."""
        return _carry_out(flow, self._whole)

    def events(self, call: GatewayCall[Any]) -> Generator[Json]:
        """The events of the stream that the call opens.

        Closing the generator ends the stream at the gateway. Raises Unavailable when the stream
        breaks off, DeadlineExceeded at its deadline, DataLoss.
        """
        with ExitStack() as held:
            opened: list[tuple[httpx.Response, float]] = []

            def begin(send: Send, end: float) -> Outcome:
                held.close()  # left by an earlier attempt
                head = exchange(self._http, send, end)
                response = held.enter_context(head)
                if response.status_code != httpx.codes.OK:
                    return HttpAnswer(response.status_code, response.headers, _body(response))
                opened.append((response, end))
                return HttpAnswer(response.status_code, response.headers, b"")

            _carry_out(opening(call, self.settings), begin)
            with closing(_events(*opened[0])) as events:
                for event in events:
                    yield event

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def _whole(self, send: Send, end: float) -> Outcome:
        with exchange(self._http, send, end) as response:
            answer = HttpAnswer(response.status_code, response.headers, _body(response))
        if time.monotonic() >= end:  # a truncated body may look complete
            raise TimeoutError("the deadline passed while the answer came in")
        return answer


def _carry_out(flow: Flow[T], once: Callable[[Send, float], Outcome]) -> T:
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
            outcome = _in_time(step, once)


def _in_time(send: Send, once: Callable[[Send, float], Outcome]) -> Outcome:
    end = time.monotonic() + send.left_s
    try:
        with until(end):
            return once(send, end)
    except TimeoutError as error:
        return Lost(sent=True, late=True, cause=error)
    except httpx.RequestError as error:
        return lost_by(error, late=time.monotonic() >= end)


def _body(response: httpx.Response) -> bytes:
    parts, size = [], 0
    for part in response.iter_bytes():
        size = within_bounds(size + len(part))
        parts.append(part)
    return b"".join(parts)


def _events(response: httpx.Response, end: float) -> Generator[Json]:
    reader = EventReader()
    pieces = response.iter_bytes()
    broken: Exception | None = None
    try:
        while not reader.done:
            with until(end):  # never across a yield: the consumer's time does not count
                piece = next(pieces, b"")
            if not piece:
                break
            for event in reader.feed(piece):
                yield event
    except (TimeoutError, httpx.RequestError) as error:
        broken = error
    if not reader.done:
        raise broken_off(broken, late=time.monotonic() >= end)
