"""Every call of the gateway's HTTP API as a value: path, body, and whether it may be repeated."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from paceline.client.answers import (
    ChatAnswer,
    Json,
    OpenedSession,
    Sample,
    SessionInfo,
    Tokens,
    need,
)
from paceline.client.options import CHAT_OPTIONS, SAMPLING, body_fields
from paceline.client.settings import check_header, check_seconds
from paceline.errors import DataLoss, InvalidInput

T = TypeVar("T")
FAIL_REASONS = ("infra", "data")
MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class GatewayCall(Generic[T]):
    """One call. `repeatable`: repeating it after a lost answer does no harm."""

    method: str
    path: str
    read: Callable[[Json | None], T] = field(repr=False)  # None: 204
    key: str = field(default="", repr=False)  # bearer token; empty: the client's
    body: Mapping[str, Any] | None = None
    repeatable: bool = True
    slow: bool = False  # may take as long as a generation
    deadline_s: float | None = None  # None: the client's
    extra_s: float = 0.0  # added to the client's deadline: the call's intended wait
    accepts: tuple[int, ...] = ()  # further statuses that are answers, besides 200 and 201
    ends_as: tuple[str, ...] = ()  # session states that satisfy the call

    def content(self) -> bytes | None:
        """The body as bytes. Raises InvalidInput for values that JSON cannot express."""
        if self.body is None:
            return None
        try:
            return json.dumps(self.body, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"the body of {self.path} is not JSON: {error}") from error


def health() -> GatewayCall[Json]:
    """503 is an answer too: {"status": "starting"}."""
    return GatewayCall("GET", "/health", dict_of, accepts=(503,))


def models() -> GatewayCall[tuple[str, ...]]:
    """Names of the models served."""
    return GatewayCall(
        "GET", "/v1/models", lambda data: tuple(need(one, "id", str) for one in _list(data, "data"))
    )


def current(api_key: str) -> OpenedSession:
    """The session of a key, with only the key known. Raises InvalidInput."""
    if not check_header(api_key, "key"):
        raise InvalidInput("a session's key is empty")
    return OpenedSession("current", api_key, "", None)


def open_session(about: Mapping[str, Any]) -> GatewayCall[OpenedSession]:
    """Repeatable after a lost answer: a session without a caller has no turns and ends by its
    time-out.
    """
    return GatewayCall("POST", "/v1/sessions", _opened, body=given(about))


def claim(
    wait_s: float, timeout_s: float | None, override_sampling: bool | None = None
) -> GatewayCall[OpenedSession | None]:
    """A session for the next task of the run; None if none arrives within `wait_s`."""
    about = {"wait_s": wait_s, "timeout_s": timeout_s, "override_sampling": override_sampling}
    body = given({"claim": True, **about})

    def read(data: Json | None) -> OpenedSession | None:
        return None if data is None else OpenedSession.read(data)

    return GatewayCall("POST", "/v1/sessions", read, body=body, accepts=(204,), extra_s=wait_s)


def session_info(session_id: str, key: str = "") -> GatewayCall[SessionInfo]:
    """State of a session."""
    return GatewayCall("GET", _path(session_id), _info, key)


def export_tree(session_id: str, key: str = "") -> GatewayCall[Json]:
    """The message tree."""
    return GatewayCall("GET", _path(session_id, "/export?form=tree"), dict_of, key)


def export_samples(session_id: str, key: str = "") -> GatewayCall[tuple[Sample, ...]]:
    """The samples for training."""
    return GatewayCall(
        "GET",
        _path(session_id, "/export?form=samples"),
        lambda data: tuple(Sample.read(one) for one in _list(data, "samples")),
        key,
    )


def reward(
    session_id: str,
    value: float,
    completion_id: str | None = None,
    accumulate: bool = False,
    key: str = "",
) -> GatewayCall[SessionInfo]:
    """A reward of the session or of one turn.

    The idempotency key is made here, once for all attempts.
    """
    return GatewayCall(
        "POST",
        _path(session_id, "/reward"),
        _info,
        key,
        _reward_body(value, completion_id, accumulate),
    )


def reward_completion(
    completion_id: str, value: float, accumulate: bool = False
) -> GatewayCall[SessionInfo]:
    """A reward of a turn in an unknown session."""
    return GatewayCall(
        "POST", "/v1/rewards", _info, body=_reward_body(value, completion_id, accumulate)
    )


def complete(
    session_id: str, value: float | None = None, key: str = ""
) -> GatewayCall[SessionInfo]:
    """Ends a session. Slow: a task of the run is scored by its rule before the answer."""
    body = {} if value is None else {"reward": finite(value)}
    ends_as = ("final", "unscored")
    return GatewayCall(
        "POST", _path(session_id, "/complete"), _info, key, body, slow=True, ends_as=ends_as
    )


def abort(session_id: str, key: str = "") -> GatewayCall[SessionInfo]:
    """Ends a session; none of its tokens are trained."""
    return GatewayCall("POST", _path(session_id, "/abort"), _info, key, {}, ends_as=("aborted",))


def fail(
    session_id: str, reason: Literal["infra", "data"], message: str = "", key: str = ""
) -> GatewayCall[SessionInfo]:
    """Ends a session that could not be completed. Raises InvalidInput for another reason."""
    if reason not in FAIL_REASONS:
        raise InvalidInput(
            "unknown reason of a failure", seen=repr(reason), allowed=", ".join(FAIL_REASONS)
        )
    body = {"reason": reason, "message": message[:MESSAGE_CHARACTERS]}
    return GatewayCall("POST", _path(session_id, "/fail"), _info, key, body, ends_as=("failed",))


def chat(
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    key: str,
    *,
    stream: bool = False,
) -> GatewayCall[ChatAnswer]:
    """One assistant message, whole or streamed."""
    body = {**body_fields(options, CHAT_OPTIONS), "messages": list(messages)}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return _generation(
        "/v1/chat/completions", ChatAnswer.read, key, body, options.get("deadline_s")
    )


def generate(
    prompt: str | Sequence[int], options: Mapping[str, Any], key: str
) -> GatewayCall[Tokens]:
    """One completion with its token ids and log-probs."""
    asked = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
    body = {
        **body_fields(options, SAMPLING),
        "prompt": asked,
        "return_token_ids": True,
        "logprobs": 0,
    }
    return _generation("/v1/completions", Tokens.read, key, body, options.get("deadline_s"))


def given(fields: Mapping[str, Any]) -> Json:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def finite(value: float) -> float:
    """A reward. Raises InvalidInput for a value that is not a finite number; True is 1.0."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput("a reward is a finite number", seen=repr(value)) from error
    if not math.isfinite(number):
        raise InvalidInput("a reward is a finite number", seen=number)
    return number


def dict_of(data: Json | None) -> Json:
    """A JSON object. Raises DataLoss for an empty answer."""
    if data is None:
        raise DataLoss("the answer is empty", allowed="a JSON object")
    return data


def _generation(
    path: str, read: Callable[[Json], T], key: str, body: Json, deadline_s: float | None
) -> GatewayCall[T]:
    if deadline_s is not None:
        check_seconds("deadline_s", deadline_s)
    return GatewayCall(
        "POST",
        path,
        lambda data: read(dict_of(data)),
        key,
        body,
        repeatable=False,
        slow=True,
        deadline_s=deadline_s,
    )


def _reward_body(value: float, completion_id: str | None, accumulate: bool) -> Json:
    return given(
        {
            "value": finite(value),
            "completion_id": completion_id,
            "accumulate": accumulate,
            "idempotency_key": uuid.uuid4().hex,
        }
    )


def _path(session_id: str, rest: str = "") -> str:
    if not session_id:
        raise InvalidInput("a session's id is empty")
    return f"/v1/sessions/{quote(session_id, safe='')}{rest}"


def _opened(data: Json | None) -> OpenedSession:
    return OpenedSession.read(dict_of(data))


def _info(data: Json | None) -> SessionInfo:
    return SessionInfo.read(dict_of(data))


def _list(data: Json | None, name: str) -> list[Json]:
    listed = need(dict_of(data), name, list)
    if not all(isinstance(one, dict) for one in listed):
        raise DataLoss(f"the answer's field {name} holds something else than objects")
    return listed
