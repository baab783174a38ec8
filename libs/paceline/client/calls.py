"""Sends calls of the gateway's HTTP API with clients of the `openai` package, and converts their
errors.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import openai
import pydantic

from paceline import errors

R = TypeVar("R")
Read = Callable[[str], R]
"""Reads the text of an answer, which is empty for 204."""
_UNSENT = {"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"}
"""Errors of httpx before a request is sent."""
_UNBEGUN = (429, 503)
"""Statuses of a generation that has not begun."""
GATEWAY = "x-paceline-gateway"
"""Header of an answer 421: the number of the right gateway. A load balancer routes by it."""
_SHOWN = 300
_BY_STATUS: dict[int, type[errors.PacelineError]] = {
    404: errors.NotFound,
    408: errors.DeadlineExceeded,
    409: errors.FailedPrecondition,
    421: errors.FailedPrecondition,
    429: errors.ResourceExhausted,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
}


def call(client: openai.OpenAI, path: str, read: Read[R], body: Any, **sent: Any) -> R:
    """Sends one call: POST with a body, GET with None. `sent`: timeout (s) and max_retries. A call
    that another gateway must answer is repeated once, with that gateway's number in its header.

    Raises the errors of `error_of`.
    """
    with _converted(path):
        try:
            return read(_send(client, path, body, sent))
        except openai.APIStatusError as error:
            return read(_send(client, path, body, _for_gateway(error, sent)))


async def async_call(
    client: openai.AsyncOpenAI, path: str, read: Read[R], body: Any, **sent: Any
) -> R:
    """`call` under asyncio."""
    with _converted(path):
        try:
            return read(await _send(client, path, body, sent))
        except openai.APIStatusError as error:
            return read(await _send(client, path, body, _for_gateway(error, sent)))


class HttpClient(openai.DefaultHttpxClient):
    """Sends a generation once: the turn of a lost answer stays in its session, and a repeated
    generation is another turn. Refused generations and other calls may be repeated.
    """

    def send(self, request: Any, **options: Any) -> Any:
        with _sent_once(request):
            return _marked(super().send(request, **options))


class AsyncHttpClient(openai.DefaultAsyncHttpxClient):
    """`HttpClient` under asyncio."""

    async def send(self, request: Any, **options: Any) -> Any:
        with _sent_once(request):
            return _marked(await super().send(request, **options))


@contextmanager
def _sent_once(request: Any) -> Iterator[None]:
    """The `openai` package repeats a request after an error of httpx, but not after its own."""
    try:
        yield
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if not _generates(request) or names & _UNSENT:
            raise
        late = "TimeoutException" in names
        kind = openai.APITimeoutError if late else openai.APIConnectionError
        raise kind(request=request) from error


def _marked(response: Any) -> Any:
    """A proxy's 502 or 504 has no x-should-retry, but the generation may have begun."""
    if _generates(response.request) and response.status_code not in _UNBEGUN:
        response.headers["x-should-retry"] = "false"
    return response


def _generates(request: Any) -> bool:
    path = request.url.path
    safe = "/v1/sessions" in path or path.endswith("/v1/rewards")
    return request.method == "POST" and not safe


def _send(client: Any, path: str, body: Any, options: Mapping[str, Any]) -> Any:
    if body is None:
        return client.get(path, cast_to=str, options=options)
    return client.post(path, cast_to=str, body=body, options=options)


def _for_gateway(error: openai.APIStatusError, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call with the number of the gateway that must answer it. Raises the error if
    it has no such number.
    """
    if (number := error.response.headers.get(GATEWAY)) is None:
        raise error
    return {**options, "headers": {GATEWAY: number}}


def reader(kind: type[R]) -> Read[R]:
    """Reads an answer. Raises DataLoss if it has another shape."""

    def read(text: str) -> R:
        try:
            return pydantic.TypeAdapter(kind).validate_json(text)
        except pydantic.ValidationError as error:
            shown = repr(text[:_SHOWN])
            message = "the answer has another shape than documented"
            raise errors.DataLoss(message, seen=shown) from error

    return read


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def error_of(error: openai.APIError) -> errors.PacelineError:
    """The error of `paceline.errors` for an error of the `openai` package.

    The class is the one with the gateway's `code` as its reason, or that of the HTTP status.
    """
    if isinstance(error, openai.APITimeoutError):
        return errors.DeadlineExceeded("no answer from the gateway in time")
    if isinstance(error, openai.APIConnectionError):
        return errors.Unavailable("no answer from the gateway", seen=repr(error.__cause__))
    if not isinstance(error, openai.APIStatusError):
        return errors.DataLoss("the answer cannot be read", seen=str(error)[:_SHOWN])
    status, body = error.status_code, error.body
    family = _BY_STATUS.get(status, errors.InternalError if status >= 500 else errors.InvalidInput)
    reason = error.code.upper() if error.code else None
    if status == 401:
        reason = "UNAUTHENTICATED"
    if not isinstance(body, Mapping) or not isinstance(body.get("message"), str):
        quoted = repr(error.response.text[:_SHOWN])
        message = f"HTTP {status} without the gateway's error body"
        return family(message, reason=reason, seen=quoted)
    return errors.FAMILIES.get(reason or "", family)(body["message"], reason=reason)


@contextmanager
def _converted(path: str) -> Iterator[None]:
    try:
        yield
    except openai.APIError as error:
        converted = error_of(error)
        converted.add_note(f"call of {path}")
        raise converted from error
