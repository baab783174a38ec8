"""Constraints on an answer's form, in the format of OpenAI and vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from paceline.services.rollout_gateway.api.http.bodies import FieldError
from paceline.services.rollout_gateway.api.http.shapes import (
    TEXT_OR_OTHER,
    JsonObject,
    OpenShape,
    StrictShape,
)
from paceline.services.rollout_gateway.engines.requests.structures import MAX_CHOICES


class SchemaBody(OpenShape):
    """A schema with a name, as response_format contains it."""

    json_schema: JsonObject | None = Field(None, alias="schema")


class ResponseFormat(OpenShape):
    """The required form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaBody | None = None

    def schema_text(self) -> str:
        """The schema as JSON text; "{}" is any object, "" no constraint."""
        if self.type == "text":
            return ""
        named = (
            self.json_schema.json_schema
            if self.type == "json_schema" and self.json_schema
            else None
        )
        return json.dumps(named or {})


JsonDemand = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[JsonObject, Tag("<other>")], TEXT_OR_OTHER
]
"""A schema, or its text."""


class StructuredOutputs(StrictShape):
    """The required structure of the answer in vLLM's format: exactly one field is set."""

    json_demand: JsonDemand | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None

    def parameters(self) -> dict[str, Any]:
        """The parameters of Sampling. Raises FieldError unless exactly one field is set."""
        schema = self.json_demand
        asked = [
            ("json_schema", json.dumps(schema) if isinstance(schema, dict) else schema),
            ("json_schema", "{}" if self.json_object else None),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
        ]
        given = [(name, value) for name, value in asked if value is not None]
        if len(given) != 1 or not given[0][1]:
            raise FieldError(
                "structured_outputs",
                "holds one demand that is not empty",
                seen=", ".join(name for name, _ in given) or "none",
                allowed="json, regex, choice, grammar or json_object",
            )
        return dict(given)
