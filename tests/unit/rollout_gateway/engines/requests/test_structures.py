"""Constraints on a response besides JSON schemas: calls in every tool format, with the same tokens
for any drafts.

A constraint that cannot be built is rejected in time, by its field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from paceline.errors import InvalidInput
from paceline.models.config import read_config
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.chat.tool_formats.families import TOOL_FORMATS, tool_format
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.requests.grammars import GrammarMasks
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.structures import (
    MAX_CHOICES,
    MAX_SCHEMA_BYTES,
    Structure,
    structure_of,
)
from paceline.services.rollout_gateway.engines.sampling import Sampling

DEMO = Path(__file__).parents[5] / "examples" / "demo"
POLICY = DEMO / "policy_start"
CODEC = TextCodec(POLICY)
EOS = 1
ARMS = ("off", "eagle:4_2_8")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yy"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = {"add": SCHEMA}


def ask(number: int, prompt: str = "12+35=", **sampling: Any) -> Request:
    settings = {"seed": number, "max_tokens": 200, **sampling}
    return Request(number, CODEC.encode(prompt), Sampling(**settings))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    spec = EmbeddedSpec(
        model_dir=str(POLICY),
        drafter=str(DEMO / "drafter_trained"),
        arms=ARMS,
        max_batch=4,
        max_sequence_tokens=400,
    )
    engine = EmbeddedEngine(spec)
    yield engine
    engine.close()


def run(engine: Any, requests: Sequence[Request], arm: str) -> list[Chunk]:
    engine.force_arm(arm)
    for one in requests:
        engine.enqueue(one)
    ended: dict[int, Chunk] = {}
    while engine.has_work:
        ended.update({chunk.request_id: chunk for chunk in engine.step()})
    return [ended[one.request_id] for one in requests]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_required_call_is_valid_in_every_format_and_the_same_with_drafts(
    engine: Any, name: str
) -> None:
    chosen = tool_format(name, "")
    assert chosen is not None
    begun = chosen.beginning()
    grammar = chosen.offering(TOOLS).required(CODEC.added_tokens, begun, several=False)
    requests = [ask(seed, f"12+35={begun}", tool_grammar=grammar) for seed in range(2)]
    plain = run(engine, requests, "off")
    for chunk in plain:
        assert (chunk.finish, chunk.error) == (Finish.STOP, "")
        reader = ChatParser(chosen.offering(TOOLS), reasoning=False, forced=begun)
        reader.push(CODEC.decode(chunk.token_ids))
        reader.finish()
        assert reader.message.content == ""
        (call,) = reader.message.tool_calls
        assert call.name == "add"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(call.arguments))
    drafted = run(engine, requests, "eagle:4_2_8")
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert min(one.speculation.drafted_tokens for one in drafted) > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a broken regex": ({"regex": "(["}, r"structured_outputs\.regex.*regex"),
    "a regex of nothing": ({"regex": "[^\\s\\S]"}, r"structured_outputs\.regex"),
    "a look-ahead": ({"regex": "(?=a)b"}, r"structured_outputs\.regex.*look"),
    "a regex too large": (
        {"regex": "x" * (MAX_SCHEMA_BYTES + 1)},
        rf"structured_outputs\.regex is too large.*{MAX_SCHEMA_BYTES} bytes",
    ),
    "a grammar without a start": ({"grammar": "a: /x/"}, r"structured_outputs\.grammar"),
    "an unknown rule": ({"grammar": "start: a"}, r"structured_outputs\.grammar.*a"),
    "a grammar that never ends": ({"grammar": "start: start"}, r"structured_outputs\.grammar"),
    "JSON for a grammar": (
        {"grammar": '{"grammars": []}'},
        r"structured_outputs\.grammar.*neither Lark nor GBNF",
    ),
    "GBNF that ends early": ({"grammar": "root ::= ("}, r"structured_outputs\.grammar.*GBNF"),
    "GBNF nested for ever": (
        {"grammar": "root ::= " + "(" * 30_000},
        r"structured_outputs\.grammar.*GBNF",
    ),
    "a hostile grammar": (
        {
            "grammar": "start: x\nx: %json "
            + json.dumps({"multipleOf": 99999971, "type": "integer"})
        },
        r"structured_outputs\.grammar.*not built within [\d.]+ s",
    ),
    "no text at all": ({"choice": ("a", "")}, r"structured_outputs\.choice.*empty"),
    "too many texts": (
        {"choice": ("a",) * (MAX_CHOICES + 1)},
        r"structured_outputs\.choice has too many texts",
    ),
    "half a surrogate": ({"choice": ("\ud800",)}, r"structured_outputs\.choice.*no text"),
    "two demands": ({"regex": "a", "choice": ("a",)}, r"structured_outputs\.choice.*no other"),
    "a broken tool": ({"tool_grammar": "start: %json {"}, "tools cannot be followed"),
    "going on after the end": (
        {"regex": "a", "ignore_eos": True},
        r"structured_outputs\.regex.*ignore_eos=true",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("demand", "named"),
    [
        pytest.param(*given, id=why, marks=[pytest.mark.slow] if "hostile" in why else [])
        for why, given in REFUSED.items()
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_field(
    engine: Any, demand: dict[str, Any], named: str
) -> None:
    engine.abort(None)
    with pytest.raises(InvalidInput, match=named):
        engine.enqueue(ask(1, **demand))
    assert not engine.has_work


def test_a_regex_holds_for_the_whole_response_with_anchors_or_without(engine: Any) -> None:
    for number, regex in enumerate(("[a-c]{2}/[0-9]+", "^[a-c]{2}/[0-9]{1,3}$")):
        (chunk,) = run(engine, [ask(number, regex=regex)], "")
        assert re.fullmatch(regex, CODEC.decode(chunk.token_ids))


@pytest.mark.parametrize(
    ("demand", "form"),
    [
        ({"json_schema": '{"enum": [7, 8]}'}, "7|8"),
        ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"choice": ("7", "88")}, "7|88"),
        ({"grammar": 'start: "<" /[0-9]/ ">"'}, "<[0-9]>"),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, "<[0-9]>"),
    ],
)
def test_a_response_is_free_up_to_a_text_and_has_its_form_behind_it(
    masks: GrammarMasks, demand: dict[str, Any], form: str
) -> None:
    asked = ask(1, **demand, free_until="</t>")
    sequence = RunningSequence(asked, frozenset({EOS}), 200)
    assert len(allowed_after(masks, sequence, [])) > 100
    sequence.tokens.extend(CODEC.encode_piece("any 9 <t></t>"))
    said = ""
    while (may := allowed_after(masks, sequence, [])) != {"<eos>"}:
        letter = min(one for one in may if one.strip() and one != "<eos>")
        said += letter
        sequence.tokens.extend(CODEC.encode_piece(letter))
    assert re.fullmatch(form, said)
    masks.drop([sequence])


# ---- tokens that a device has drawn ahead of the response


@pytest.fixture(scope="module")
def masks() -> Iterator[GrammarMasks]:
    masks = GrammarMasks(read_config(POLICY), POLICY)
    yield masks
    masks.close()


def sequence_of(said: Sequence[int]) -> RunningSequence:
    asked = ask(1, regex="(ab|ac|b)[0-9]{3}")
    return RunningSequence(asked, frozenset({EOS}), 200, tokens=list(said))


def allowed_after(masks: GrammarMasks, sequence: RunningSequence, ahead: Sequence[int]) -> set[str]:
    assert masks.follow(sequence, ahead)
    logits, root = torch.zeros(1, 320), torch.zeros(1, 1, dtype=torch.int64)
    masks.mask_({0: sequence}, root, root, logits)
    return {CODEC.token_text(int(token)) for token in torch.nonzero(logits[0] == 0)[:, 0]}


def test_tokens_ahead_of_a_response_count_and_are_taken_back_when_others_come(
    masks: GrammarMasks,
) -> None:
    a, b, c, one = (CODEC.encode_piece(letter)[0] for letter in "abc1")
    sequence = sequence_of([a])
    assert allowed_after(masks, sequence, []) == {"b", "c"}
    assert allowed_after(masks, sequence, [b]) >= {"0", "9"}
    assert "a" not in allowed_after(masks, sequence, [b, one])
    assert allowed_after(masks, sequence, []) == {"b", "c"}  # lost with their round
    sequence.tokens.append(c)  # drawn anew, and another one
    expected = allowed_after(masks, sequence_of([a, c, one]), [])
    assert allowed_after(masks, sequence, [one]) == expected
    sequence.tokens.append(one)
    assert allowed_after(masks, sequence, []) == expected
    masks.drop([sequence])


def test_logits_beyond_the_vocabulary_are_forbidden_too(masks: GrammarMasks) -> None:
    sequence = sequence_of([])
    assert masks.follow(sequence)
    logits, roots = torch.zeros(2, 327), torch.zeros(2, 1, dtype=torch.int64)
    masks.mask_({1: sequence}, roots, roots, logits)
    assert bool((logits[0] == 0).all())
    assert bool((logits[1, 320:] == -torch.inf).all())
    assert 1 <= int((logits[1] == 0).sum()) < 10


def test_a_demand_is_the_one_that_is_there() -> None:
    assert structure_of(Sampling(1, 1)) is None
    assert structure_of(Sampling(1, 1, choice=("a", "ü"))) == Structure("choice", '["a", "ü"]')
    assert structure_of(Sampling(1, 1, json_schema="{}")) == Structure("json_schema", "{}")
