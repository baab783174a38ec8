"""JSON schemas of answers for the published document. They contain the fields that a client may
rely on, not every field.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def optional(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema) -> Schema:
    """A list of items with the schema."""
    return {"type": "array", "items": schema}


def fields(**properties: Schema) -> Schema:
    """An object with at least these fields."""
    return {"type": "object", "properties": properties, "required": sorted(properties)}


EVENT: Schema = fields(
    data={"type": "string", "description": "JSON, or [DONE] where completions end."}
)
"""One server-sent event."""


def constant(value: str) -> Schema:
    """A constant text."""
    return {"type": "string", "const": value}


def _named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _choices(kind: str, **said: Schema) -> Schema:
    """An answer with several choices."""
    return fields(
        id=TEXT,
        object=constant(kind),
        created=WHOLE,
        model=TEXT,
        choices=listed(fields(index=WHOLE, **said, finish_reason=optional(TEXT))),
        usage=fields(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE),
    )


_RESPONSES_USAGE = fields(input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE)
_MESSAGES_USAGE = fields(input_tokens=WHOLE, output_tokens=WHOLE, cache_read_input_tokens=WHOLE)
_MESSAGE = {**fields(role=constant("assistant"), content=optional(TEXT))}
_ERROR = fields(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT))
_TURN = fields(
    completion_id=TEXT,
    parent=optional(TEXT),
    prompt_ids=listed(WHOLE),
    response_ids=listed(WHOLE),
    behavior_logprobs=listed(NUMBER),
    version_spans=listed(listed(WHOLE)),
    draw_spans=listed(listed(ANY)),
    finish_reason=TEXT,
    message=optional(ANY),
    reward=optional(NUMBER),
)
_SAMPLE = fields(
    token_ids=listed(WHOLE),
    loss_mask=listed(WHOLE),
    behavior_logprobs=listed(NUMBER),
    reward=optional(NUMBER),
)
_RESPONSE_STATUS = {"enum": ["completed", "incomplete", "failed", "in_progress"]}
_STOP_REASON = {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}

ANSWERS: dict[str, Schema] = {
    "Error": fields(error=_ERROR),
    "AnthropicError": fields(type=constant("error"), error=fields(type=TEXT, message=TEXT)),
    "Health": fields(status={"enum": ["ok", "starting"]}, model=TEXT, workers=WHOLE),
    "Model": fields(
        id=TEXT, object=constant("model"), created=WHOLE, owned_by=TEXT, max_model_len=WHOLE
    ),
    "Version": fields(version=TEXT),
    "Tokens": fields(count=WHOLE, max_model_len=WHOLE, tokens=listed(WHOLE)),
    "Text": fields(prompt=TEXT),
    "ModelList": fields(object=constant("list"), data=listed(_named("Model"))),
    "Completion": _choices("text_completion", text=TEXT),
    "ChatCompletion": _choices("chat.completion", message=_MESSAGE),
    "Response": fields(
        id=TEXT,
        object=constant("response"),
        created_at=WHOLE,
        status=_RESPONSE_STATUS,
        model=TEXT,
        output=listed(
            fields(id=TEXT, type={"enum": ["reasoning", "message", "function_call"]}, status=TEXT)
        ),
        usage=optional(_RESPONSES_USAGE),
        metadata=ANY,
    ),
    "DeletedResponse": fields(id=TEXT, object=constant("response"), deleted=FLAG),
    "Message": fields(
        id=TEXT,
        type=constant("message"),
        role=constant("assistant"),
        model=TEXT,
        content=listed(fields(type={"enum": ["thinking", "text", "tool_use"]})),
        stop_reason=_STOP_REASON,
        stop_sequence=optional(TEXT),
        usage=_MESSAGES_USAGE,
    ),
    "TokenCount": fields(input_tokens=WHOLE),
    "Session": fields(id=TEXT, object=constant("session"), state=TEXT, fail_reason=optional(TEXT)),
    "OpenedSession": fields(
        id=TEXT,
        object=constant("session"),
        state=TEXT,
        api_key=TEXT,
        group_id=TEXT,
        task=optional(fields(id=TEXT, prompt=TEXT, metadata=ANY)),
    ),
    "SessionExport": {
        "allOf": [
            _named("Session"),
            {"anyOf": [fields(tree=listed(_TURN)), fields(samples=listed(_SAMPLE))]},
        ]
    },
}
"""Schemas by name, as in `components.schemas`."""
FORM = {"name": "form", "in": "query", "schema": {"enum": ["tree", "samples"], "default": "tree"}}
