"""Responses that follow a JSON schema: valid to an independent validator, and drawn as documented
for any drafts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gumbel_oracle
import jsonschema_rs
import numpy as np
import pytest
import torch
from drawn_cases import case_count
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from random_models import save_random
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidInput, MissingCapability, TrainabilityError
from paceline.models.config import read_config
from paceline.services.rollout_gateway.calls.planner import check_request
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.embedded.verify import Nodes
from paceline.services.rollout_gateway.engines.nouns import (
    Capability,
    Chunk,
    Finish,
    PauseMode,
    Request,
)
from paceline.services.rollout_gateway.engines.requests import grammars as grammars_module
from paceline.services.rollout_gateway.engines.requests.grammars import GrammarMasks
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.structures import (
    MAX_SCHEMA_BYTES,
    MAX_SPACE,
    GrammarFault,
    Structure,
    parse_schema,
)
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.sessions.tree import check_trainable
from paceline.trajectory import NEAR_TIE_GAP
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

DEMO = Path(__file__).parents[5] / "examples" / "demo"
POLICY = DEMO / "policy_start"
TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
EOS = 1
ARMS = ("off", "eagle:3_1_4", "eagle:4_2_8", "ngram:4_1_5")
SEEDS = (3, 4, 5)


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": closed(
        answer={"type": "integer", "minimum": -50, "maximum": 999}, sure={"type": "boolean"}
    ),
    "choice": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "array": {"type": "array", "items": {"enum": [0.5, 1, "x"]}, "minItems": 2, "maxItems": 4},
    "text": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[0-9]{2}-[a-f]{3}$"},
    "nested": closed(
        n=closed(x={"type": "array", "items": SHORT, "maxItems": 3}),
        m={"anyOf": [SHORT, {"const": 0}]},
    ),
    "reference": {
        "$defs": {"t": closed(v=SHORT)},
        "type": "array",
        "items": {"$ref": "#/$defs/t"},
        "maxItems": 2,
    },
}


def build(model_dir: Path = POLICY, **settings: Any) -> EmbeddedEngine:
    """Three slots only, so that requests move when other requests end."""
    spec = {
        "model_dir": str(model_dir),
        "drafter": str(DEMO / "drafter_trained"),
        "arms": ARMS,
        "max_batch": 3,
        "max_sequence_tokens": 300,
        **settings,
    }
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(spec))
    assert isinstance(engine, EmbeddedEngine)
    return engine


def ask(number: int, schema: object = None, **sampling: Any) -> Request:
    prompt = tuple(TOKENIZER.encode(f"{number}+35=").ids)
    text = "" if schema is None else json.dumps(schema)
    return Request(
        number,
        prompt,
        Sampling(**{"seed": number, "max_tokens": 280, "json_schema": text, **sampling}),
    )


def run(
    engine: EmbeddedEngine, requests: Sequence[Request], arm: str = "", *, retract: bool = False
) -> list[Chunk]:
    """Last chunks in the order of the requests."""
    engine.force_arm(arm)
    for one in requests:
        engine.enqueue(one)
    ended: dict[int, Chunk] = {}
    while engine.has_work:
        ended.update({chunk.request_id: chunk for chunk in engine.step()})
        if retract:
            engine.pause(PauseMode.RETRACT)
            engine.resume()
    return [ended[one.request_id] for one in requests]


def said(chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
    return [chunk.token_ids for chunk in chunks]


def every_schema() -> list[Request]:
    pairs = [(schema, seed) for schema in SCHEMAS.values() for seed in SEEDS]
    return [ask(number, schema, seed=seed) for number, (schema, seed) in enumerate(pairs)]


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    return build()


@pytest.fixture(scope="module")
def plain() -> list[Chunk]:
    """The outputs for `every_schema` without drafts."""
    return run(build(), every_schema(), "off")


def text_of(chunk: Chunk) -> str:
    return str(TOKENIZER.decode(list(chunk.token_ids)))


# ---- generated text


def test_every_response_parses_validates_and_stops(plain: list[Chunk]) -> None:
    for request, chunk in zip(every_schema(), plain, strict=True):
        assert (chunk.finish, chunk.error) == (Finish.STOP, "")
        assert chunk.token_ids[-1] == EOS
        assert chunk.token_ids.count(EOS) == 1
        schema = json.loads(request.sampling.json_schema)
        assert jsonschema_rs.is_valid(schema, json.loads(text_of(chunk))), (schema, text_of(chunk))
    assert len({text_of(chunk) for chunk in plain}) > len(SCHEMAS)


@pytest.mark.slow
def test_an_empty_schema_is_any_json_object_and_nothing_else(engine: EmbeddedEngine) -> None:
    chunks = run(engine, [ask(number, {}, temperature=1.3) for number in range(8)])
    ended = [chunk for chunk in chunks if chunk.finish is Finish.STOP]
    assert ended
    assert all(isinstance(json.loads(text_of(chunk)), dict) for chunk in ended)
    assert all(text_of(chunk).startswith("{") for chunk in chunks)


def test_a_response_cut_by_its_limit_is_the_beginning_of_the_whole_one(
    engine: EmbeddedEngine, plain: list[Chunk]
) -> None:
    cut = [replace(one, sampling=replace(one.sampling, max_tokens=5)) for one in every_schema()]
    for short, whole in zip(run(engine, cut), plain, strict=True):
        assert short.token_ids == whole.token_ids[:5]
        assert short.finish is (Finish.STOP if len(whole.token_ids) <= 5 else Finish.LENGTH)


def test_white_space_is_bounded_so_that_no_response_is_blank_for_ever(
    engine: EmbeddedEngine,
) -> None:
    space = tuple(
        (token, 50.0) for token in sorted(TOKENIZER.encode(" \n", add_special_tokens=False).ids)
    )
    (chunk,) = run(
        engine, [ask(1, {"type": "array", "maxItems": 1, "items": {"const": 1}}, logit_bias=space)]
    )
    assert chunk.finish is Finish.STOP
    assert (
        max(map(len, text_of(chunk).split("[")[1].split("1" if "1" in text_of(chunk) else "]")))
        <= MAX_SPACE + 1
    )


@pytest.mark.parametrize("arm", ["off", "eagle:4_2_8"])
def test_tokens_and_logprobs_are_those_of_the_masked_distribution(
    engine: EmbeddedEngine, arm: str
) -> None:
    texts = ['"12+1"', '"12-30"', '"9"']
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    requests = [
        ask(n, {"enum": [json.loads(text) for text in texts]}, temperature=0.7, seed=40 + n)
        for n in range(4)
    ]
    for request, chunk in zip(requests, run(engine, requests, arm), strict=True):
        prompt, tokens = request.prompt, chunk.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].numpy()
        for index, (token, logprob) in enumerate(zip(tokens, chunk.behavior_logprobs, strict=True)):
            masked = masked_by_hand(logits[len(prompt) + index - 1], tokens[:index], texts)
            drawn, expected = gumbel_oracle.draw(
                masked, 0.7, request.sampling.seed, len(prompt) + index
            )
            assert token == drawn, (request.request_id, index)
            assert logprob == pytest.approx(expected, abs=2e-4), (request.request_id, index)


def masked_by_hand(logits: Any, before: Sequence[int], texts: Sequence[str]) -> Any:
    """Return logits of the tokens that continue one of the texts, by the text of every vocabulary
    token.
    """
    head = TOKENIZER.decode(list(before))
    rest = {one[len(head) :] for one in texts if one.startswith(head)}
    firsts = {one[:1] for one in rest}
    allowed = [t for t in range(len(logits)) if t != EOS and TOKENIZER.decode([t]) in firsts - {""}]
    if len(firsts) == 1:  # one text alone: the token the tokenizer takes for it
        allowed = TOKENIZER.encode(firsts.pop(), add_special_tokens=False).ids
    masked = np.full_like(logits, -np.inf)
    allowed = [*allowed, EOS] if "" in rest else allowed
    masked[allowed] = logits[allowed]
    return masked


def test_alternatives_are_tokens_that_may_follow(engine: EmbeddedEngine) -> None:
    (chunk,) = run(engine, [ask(1, {"const": "ab"}, top_logprobs=5)])
    assert text_of(chunk) == '"ab"'
    for token, logprob, alternatives in zip(
        chunk.token_ids, chunk.behavior_logprobs, chunk.top_logprobs, strict=True
    ):
        assert 1 <= len(alternatives) <= 2  # a quote is a byte token alone, digits are two tokens
        assert dict(alternatives)[token] == pytest.approx(logprob, abs=1e-6)
        assert sum(np.exp(value) for _, value in alternatives) == pytest.approx(1.0, abs=1e-5)


# ---- company and speculation


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("arm", [*ARMS[1:], ""])
def test_every_arm_gives_the_tokens_of_plain_decoding(arm: str, plain: list[Chunk]) -> None:
    assert min(chunk.smallest_gap for chunk in plain) > NEAR_TIE_GAP, "choose other seeds"
    drafted = run(build(), every_schema(), arm)
    assert said(drafted) == said(plain)
    for chunk, expected in zip(drafted, plain, strict=True):
        assert chunk.behavior_logprobs == pytest.approx(expected.behavior_logprobs, abs=1e-4)
    assert sum(chunk.speculation.accepted_tokens for chunk in drafted) > 0


@pytest.mark.slow
def test_verifying_every_draft_and_rebuilding_the_cache_change_no_token(plain: list[Chunk]) -> None:
    some = every_schema()[::3]
    assert said(run(build(verify_budget=False), some, "eagle:4_2_8")) == said(plain[::3])
    assert said(run(build(), some, "eagle:4_2_8", retract=True)) == said(plain[::3])


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["off", "eagle:4_2_8", "ngram:4_1_5"])
def test_neighbours_without_a_schema_say_what_they_say_alone(arm: str) -> None:
    free = [ask(100 + number, max_tokens=40, ignore_eos=True) for number in range(4)]
    alone = run(build(), free, arm)
    bound = every_schema()[:6]
    mixed = [one for pair in zip(free, bound, strict=False) for one in pair] + bound[4:]
    together = {chunk.request_id: chunk for chunk in run(build(), mixed, arm)}
    assert [together[one.request_id].token_ids for one in free] == said(alone)
    for one, chunk in zip(free, alone, strict=True):  # 4e-4 from float64 in either company
        assert together[one.request_id].behavior_logprobs == pytest.approx(
            chunk.behavior_logprobs, abs=1e-3
        )


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.6, "min_p": 0.05},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"logit_bias": ((EOS, 100.0), (5, -100.0))},
]


@pytest.mark.slow
def test_other_settings_of_the_draw_go_with_a_schema_under_every_arm() -> None:
    schema = SCHEMAS["array"]
    requests = [ask(n, schema, **settings) for n, settings in enumerate(SETTINGS)]
    expected = run(build(), requests, "off")
    for chunk in expected:
        assert chunk.finish is Finish.STOP
        assert jsonschema_rs.is_valid(schema, json.loads(text_of(chunk)))
    for arm in ARMS[1:]:
        assert said(run(build(), requests, arm)) == said(expected), arm


# ---- masks of draft trees


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarMasks]:
    grammars = GrammarMasks(read_config(POLICY), POLICY)
    yield grammars
    grammars.close()


def masked(
    grammars: GrammarMasks,
    schema: object,
    said: Sequence[int],
    tokens: Sequence[int] = (0,),
    parents: Sequence[int] = (0,),
) -> torch.Tensor:
    """Zeros where a token may follow a node of the tree, [Q, V]; nodes that are not reached are all
    zeros.
    """
    sequence = RunningSequence(ask(1, schema), frozenset({EOS}), 280, tokens=list(said))
    assert grammars.follow(sequence)
    logits = torch.zeros(len(tokens), TOKENIZER.get_vocab_size())
    nodes = Nodes(torch.tensor([tokens]), torch.tensor([parents]))
    grammars.mask_({0: sequence}, nodes.tokens, nodes.every_parent, logits)
    assert nodes.tokens.tolist() == [list(tokens)]
    grammars.drop([sequence])
    return logits


@hypothesis_settings(max_examples=case_count(40), deadline=None)
@given(data=st.data())
def test_each_node_of_a_tree_is_masked_as_if_its_path_had_been_said(
    data: st.DataObject, plain: list[Chunk], grammars: GrammarMasks
) -> None:
    place = data.draw(st.integers(0, len(plain) - 1))
    whole, schema = plain[place].token_ids, json.loads(every_schema()[place].sampling.json_schema)
    start = data.draw(st.integers(0, len(whole) - 1))
    width = data.draw(st.integers(2, 8))
    parents = [0, *(data.draw(st.integers(0, node - 1)) for node in range(1, width))]
    depths = [0] * width
    for node in range(1, width):
        depths[node] = depths[parents[node]] + 1
    # Drafts that fit the grammar are from the response itself; other drafts are any token, or none.
    right = [whole[min(start + depth - 1, len(whole) - 1)] for depth in depths]
    tokens = [
        0,
        *(
            data.draw(st.sampled_from([right[node], right[node], 5, EOS, -1]))
            for node in range(1, width)
        ),
    ]
    logits = masked(grammars, schema, whole[:start], tokens, parents)
    for node in range(width):
        path = path_of(node, tokens, parents)
        if (
            -1 not in path
            and EOS not in path
            and may_be_said(grammars, schema, whole[:start], path)
        ):
            assert torch.equal(logits[node], masked(grammars, schema, [*whole[:start], *path])[0])
        else:
            assert bool((logits[node] == 0).all())


def path_of(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    return [] if node == 0 else [*path_of(parents[node], tokens, parents), tokens[node]]


def may_be_said(
    grammars: GrammarMasks, schema: object, said: Sequence[int], path: Sequence[int]
) -> bool:
    """Check the path by masks without trees."""
    steps = (
        (masked(grammars, schema, [*said, *path[:index]])[0], token)
        for index, token in enumerate(path)
    )
    return all(mask[token] == 0 for mask, token in steps)


# ---- refusals and faults

REFUSED = {
    "not json": ("nonsense", "response_format.*not JSON"),
    "not an object": ("[1]", "response_format.*not a JSON object"),
    "a number": ("3", "response_format.*not a JSON object"),
    "two values": ('{} }, {"lark_grammar": "start: /x/"', "response_format.*not JSON"),
    "unknown type": ('{"type":"objct"}', "response_format.*objct"),
    "unknown reference": ('{"$ref":"#/nope"}', "response_format.*nope"),
    "broken pattern": ('{"type":"string","pattern":"(["}', "response_format.*regex"),
    "keyword not followed": ('{"not":{}}', "response_format.*not"),
    "impossible": (json.dumps(closed(a=False)), "response_format.*(?i:unsatisfiable)"),
    "half a surrogate": (r'{"const":"\ud800"}', "response_format"),
    "no number of JSON": ('{"const":NaN}', "response_format"),
    "nested for ever": ('{"items":' * 900 + "{}" + "}" * 900, "response_format"),
    "nested deeper still": ("[" * 30_000, "response_format.*not JSON"),
    "too large": (
        json.dumps({"const": "x" * MAX_SCHEMA_BYTES}),
        rf"response_format.*{MAX_SCHEMA_BYTES} bytes",
    ),
    "too many parts": (
        json.dumps({"allOf": [{"anyOf": [closed(a=SHORT), closed(b=SHORT)]}] * 16}),
        "response_format",
    ),
    "too long to build": (
        '{"type":"integer","multipleOf":99999989}',
        r"response_format.*not built within [\d.]+ s",
    ),
    "never built": (
        json.dumps(
            {"type": "string", "allOf": [{"pattern": f"^.*a{{{n}}}.*$"} for n in range(1, 40)]}
        ),
        r"response_format.*not built within [\d.]+ s",
    ),
}


@pytest.mark.slow
def test_a_schema_that_takes_too_long_is_refused_with_the_deadline_that_passed(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PATIENCE", "1.5")
    with pytest.raises(InvalidInput, match="not built within 3 s"):
        engine.enqueue(ask(0, json_schema='{"type":"integer","multipleOf":99999721}'))


@pytest.mark.slow
def test_a_schema_that_takes_too_long_is_built_once_for_many_requests(
    engine: EmbeddedEngine,
) -> None:
    schema = '{"type":"integer","multipleOf":99999787}'
    for number in range(2):
        with pytest.raises(InvalidInput, match=r"not built within [\d.]+ s"):
            engine.enqueue(ask(number, json_schema=schema))
        if number == 0:
            judge = engine._grammars._judge
            assert judge is not None
            assert judge._process is None  # killed with its unfinished grammar
    assert judge._process is None  # nobody started another one


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        pytest.param(*given, id=why, marks=[pytest.mark.slow] if "buil" in why else [])
        for why, given in REFUSED.items()
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_when_it_comes(
    engine: EmbeddedEngine, schema: str, named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        engine.enqueue(ask(1, json_schema=schema))
    assert not engine.has_work


def test_a_schemas_own_guidance_cannot_make_the_text_something_else_than_json(
    engine: EmbeddedEngine,
) -> None:
    own = {"x-guidance": {"item_separator": ";", "key_separator": "=", "whitespace_pattern": "x"}}
    (chunk,) = run(engine, [ask(1, SCHEMAS["object"] | own)])
    assert jsonschema_rs.is_valid(SCHEMAS["object"], json.loads(text_of(chunk)))


def test_going_on_after_the_end_is_refused_with_a_schema(engine: EmbeddedEngine) -> None:
    with pytest.raises(InvalidInput, match=r"response_format.*ignore_eos=true"):
        engine.enqueue(ask(1, {}, ignore_eos=True))


def test_a_grammar_that_faults_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [ask(100 + number, max_tokens=40, ignore_eos=True) for number in range(3)]
    alone = run(build(), free)

    def tight(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(step_max_items=5))

    monkeypatch.setattr(grammars_module.structures, "build_matcher", tight)
    engine = build()
    chunks = run(
        engine, [free[0], ask(1, SCHEMAS["nested"]), free[1], ask(2, SCHEMAS["nested"]), free[2]]
    )
    assert said(chunks[::2]) == said(alone)
    for chunk in chunks[1::2]:
        assert chunk.finish is Finish.ERROR
        assert "response_format cannot be followed" in chunk.error
        assert "limit 5" in chunk.error
    assert engine.load.running == len(engine._grammars) == 0


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS[1:])
def test_a_fault_under_a_draft_costs_drafts_and_changes_no_token(
    arm: str, plain: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    descend, faults = GrammarMasks._descend, []

    def break_off(
        self: GrammarMasks, matcher: Any, tokens: Any, children: Any, node: int, masks: Any
    ) -> None:
        if node and len(masks) % 2 == 0:
            faults.append(
                matcher.consume_token(EOS)
            )  # leaves a matcher that is broken or has ended
            raise GrammarFault("as if a limit were reached")
        descend(self, matcher, tokens, children, node, masks)

    monkeypatch.setattr(GrammarMasks, "_descend", break_off)
    assert said(run(build(verify_budget=False), every_schema()[::2], arm)) == said(plain[::2])
    assert faults


def test_nothing_is_built_for_requests_without_a_schema() -> None:
    engine = build()
    run(engine, [ask(1, max_tokens=10)])
    assert (
        engine._grammars._tokens,
        engine._grammars._built.cache_info().currsize,
        len(engine._grammars),
    ) == (
        None,
        0,
        0,
    )


def test_matchers_go_with_their_requests_and_grammars_are_bounded() -> None:
    engine = build()
    for number in range(20):
        engine.enqueue(ask(number, {"const": number}))
    engine.step()
    assert len(engine._grammars) == 3
    engine.abort(frozenset({0, 1}))
    assert len(engine._grammars) == 1
    while engine.has_work:
        engine.step()
    assert len(engine._grammars) == 0
    assert engine._grammars._built.cache_info().currsize == grammars_module.KEPT_GRAMMARS


# ---- tokenizers and models


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level BPE of merged pieces, a padded vocabulary and two end
    tokens.
    """
    directory = tmp_path_factory.mktemp("bpe")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<turn>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(
        ['{"n": "été", "answer": [true, false, 12]}', '":"', '"]}'] * 20, trainer
    )
    save_random(
        directory, "llama", sharpness=0.3, vocab_size=320, eos_token_id=[0, 1], bos_token_id=2
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.slow
def test_merged_tokens_several_ends_and_a_padded_vocabulary_give_valid_json(
    byte_level: Path,
) -> None:
    tokenizer = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    requests = [
        Request(n, (5, 6, 7), Sampling(seed=n, max_tokens=250, json_schema=json.dumps(schema)))
        for n, schema in enumerate([*SCHEMAS.values(), *SCHEMAS.values()])
    ]
    settings: dict[str, Any] = {"drafter": "eagle", "max_sequence_tokens": 256}
    chunks = run(build(byte_level, **settings), requests, "off")
    for request, chunk in zip(requests, chunks, strict=True):
        assert chunk.finish is Finish.STOP
        value = json.loads(tokenizer.decode(list(chunk.token_ids)))
        assert jsonschema_rs.is_valid(json.loads(request.sampling.json_schema), value)
    assert {chunk.token_ids[-1] for chunk in chunks} == {0, 1}
    assert said(run(build(byte_level, **settings), requests, "eagle:4_2_8")) == said(chunks)


def test_a_vocabulary_that_cannot_say_the_schema_is_refused(
    byte_level: Path, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(byte_level, tmp_path / "model")
    raw = json.loads((model_dir / "tokenizer.json").read_text())
    raw["model"] = {
        **raw["model"],
        "merges": [],
        "vocab": {"<end>": 0, "<turn>": 1, "a": 2, "b": 3},
    }
    (model_dir / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInput, match=r"response_format.*NoExtension"):
        build(model_dir, drafter="eagle", max_sequence_tokens=256).enqueue(ask(1, {}))


def test_a_tokenizer_that_is_no_text_of_bytes_is_refused_by_its_path(
    byte_level: Path, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(byte_level, tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.save(str(model_dir / "tokenizer.json"))
    with pytest.raises(
        InvalidInput, match=r"response_format.*needs another.*model/tokenizer\.json.*null"
    ):
        build(model_dir, drafter="eagle", max_sequence_tokens=256).enqueue(ask(1, {}))


def test_an_engine_without_tokenizer_lacks_the_capability_and_says_so(
    byte_level: Path, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(byte_level, tmp_path / "model")
    (model_dir / "tokenizer.json").unlink()
    engine = build(model_dir, drafter="eagle", max_sequence_tokens=256)
    assert Capability.JSON_SCHEMA not in engine.info.capabilities
    with pytest.raises(
        MissingCapability,
        match=r"embedded engine lacks the capability json_schema.*tokenizer\.json",
    ):
        engine.enqueue(ask(1, {}))


# ---- the way to the engine


def ready(*capabilities: Capability) -> pb.WorkerReady:
    return pb.WorkerReady(vocab_size=320, max_sequence_tokens=64, capabilities=sorted(capabilities))


def test_a_schema_crosses_the_wire_and_an_absent_one_is_none() -> None:
    assert wire.sampling_from(tpb.SamplingParams(max_tokens=1)).json_schema == ""
    assert (
        wire.sampling_from(tpb.SamplingParams(max_tokens=1, json_schema="{}")).json_schema == "{}"
    )


def test_the_gateway_refuses_what_the_engine_would() -> None:
    asked = Sampling(1, 1, json_schema="{}")
    check_request(ready(Capability.JSON_SCHEMA), [5], asked)
    with pytest.raises(
        MissingCapability, match=r"json_schema.*response_format.*engine\.kind=embedded"
    ):
        check_request(ready(Capability.PENALTIES), [5], asked)
    with pytest.raises(InvalidInput, match="response_format"):
        check_request(
            ready(Capability.JSON_SCHEMA),
            [5],
            Sampling(1, 1, json_schema="nonsense"),
        )
    asked = Sampling(1, 1, json_schema="{}", ignore_eos=True)
    with pytest.raises(InvalidInput, match="ignore_eos"):
        check_request(ready(Capability.JSON_SCHEMA), [5], asked)


def test_a_response_under_a_schema_is_not_trained() -> None:
    with pytest.raises(TrainabilityError, match=r"json_schema=\{\}.*neutral values"):
        check_trainable(Sampling(1, 1, json_schema="{}"))


@given(
    text=st.text(max_size=30)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
@hypothesis_settings(max_examples=case_count(100), deadline=None)
def test_any_text_is_a_schema_or_invalid_input(text: str) -> None:
    try:
        parse_schema(Structure("json_schema", text))
        known = True
    except InvalidInput:
        known = False
    assert known == is_object(text)


def is_object(text: str) -> bool:
    """Check by another parser: a schema that is only an object accepts exactly objects."""
    try:
        return bool(jsonschema_rs.is_valid({"type": "object"}, json.loads(text)))
    except ValueError:
        return False
