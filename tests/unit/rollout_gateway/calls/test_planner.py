"""A request becomes plans: its session and turn, the form of its answers, and its seeds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_models import CHATML, MODELS, codec_of, vocab_size
from dialogue_engine import Desk, Saying, done, sampling
from session_turns import session
from tokenizer_families import byte_level

from paceline.errors import (
    FailedPrecondition,
    InvalidInput,
    ResourceExhausted,
    TrainabilityError,
    Unavailable,
)
from paceline.services.rollout_gateway.calls.call import Call, Plan, generation_seed
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, ToolChoice
from paceline.services.rollout_gateway.engines.sampling import UNSEEDED
from paceline.services.rollout_gateway.sessions import Assignment, SessionState
from paceline.services.rollout_gateway.sessions.session import Caller, Session
from paceline.v1 import trajectory_pb2 as tpb

MODEL = {model.name: model for model in MODELS}["chatml"]
CODEC = MODEL.codec
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("add", "look"))
USER = Message("user", "12+30=")


@pytest.fixture
def desk() -> Desk:
    return Desk(CODEC, MODEL.vocab_size)


def saying(text: str, finish: str = "stop") -> Saying:
    return Saying((*CODEC.encode_piece(text), MODEL.end_id), finish)


def chat(
    desk: Desk, where: Session | None, *messages: Message, count: int = 1, **change: Any
) -> list[Plan]:
    asked = {key: change.pop(key) for key in ("tools", "tool_choice", "prefill") if key in change}
    request = ChatRequest(messages, **asked)
    return desk.chat(Asked(Caller(where), sampling(**change), desk.name, count), request)


def text_of(plan: Plan) -> str:
    return CODEC.decode_all(plan.prompt)


@pytest.mark.parametrize("base", [0, 7, 2**63 - 1])
def test_generations_of_a_session_draw_with_seeds_of_their_own(desk: Desk, base: int) -> None:
    def seeds() -> list[int]:
        where = session(about=Assignment("run", seed=base))
        found = [plan.sampling.seed for plan in chat(desk, where, USER, count=2)]
        (alone,) = chat(desk, where, USER)
        plans = desk.completions(Asked(Caller(where), sampling(), "x", 2), ["a", "b"])
        return [*found, alone.sampling.seed, *(plan.sampling.seed for plan in plans)]

    first = seeds()
    assert first[0] == base
    assert first == [generation_seed(base, number) for number in range(7)] == seeds()
    assert len(set(first)) == 7
    assert all(0 <= seed < 2**63 for seed in first)


def test_sessions_with_other_seeds_draw_otherwise() -> None:
    drawn = [generation_seed(base, number) for base in range(50) for number in range(50)]
    assert len(set(drawn)) == len(drawn)


def test_a_seed_of_the_callers_own_is_kept_and_without_any_none_is_set(desk: Desk) -> None:
    (own,) = chat(desk, session(about=Assignment("run", seed=5)), USER, seed=9)
    assert own.sampling.seed == 9
    (none,) = chat(desk, session(), USER)
    assert none.sampling.seed == UNSEEDED


def test_every_choice_has_a_name_of_its_own(desk: Desk) -> None:
    assert [plan.completion_id for plan in chat(desk, None, USER, count=2)] == ["c0:0", "c0:1"]
    assert [plan.completion_id for plan in chat(desk, None, USER)] == ["c1"]
    plans = desk.completions(Asked(Caller(), sampling(), "x", 2), ["a", "b"])
    assert [plan.completion_id for plan in plans] == ["x:0", "x:1", "x:2", "x:3"]


def test_a_named_tool_is_what_the_answer_begins_with(desk: Desk) -> None:
    choice = ToolChoice("named", "look")
    (plan,) = chat(desk, session(), USER, tools=TOOLS, tool_choice=choice)
    assert text_of(plan).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments":'
    )
    piece = desk.answer(plan, saying(' {"word": "über"}}\n</tool_call>'))
    assert piece.message is not None
    assert piece.finish == "tool_calls"
    ((name, arguments),) = [
        (call.name, json.loads(call.arguments)) for call in piece.message.tool_calls
    ]
    assert (name, arguments) == ("look", {"word": "über"})


def test_a_required_tool_is_the_models_choice(desk: Desk) -> None:
    (plan,) = chat(desk, session(), USER, tools=TOOLS, tool_choice=ToolChoice("required"))
    assert text_of(plan).endswith('<|im_start|>assistant\n<tool_call>\n{"name":')


STRICT = ChatRequest((USER,), TOOLS, strict_tools=frozenset({"add"}))
REQUIRED = ChatRequest((USER,), TOOLS, ToolChoice("required"))


def grammar_of(where: Desk, request: ChatRequest, held: Session | None, **change: Any) -> str:
    (plan,) = where.chat(Asked(Caller(held), sampling(**change), where.name), request)
    assert not (plan.sampling.tool_grammar and plan.sampling.json_schema)
    return plan.sampling.tool_grammar


@pytest.mark.parametrize("request_", [STRICT, REQUIRED], ids=["strict", "required"])
def test_calls_follow_a_grammar_where_nothing_of_them_may_be_trained(
    request_: ChatRequest,
) -> None:
    untrained = Assignment("run", trainable=False)
    for settings, held, follows in (
        ({}, None, True),
        ({}, session(about=untrained), True),
        ({}, session(), False),
        ({"trajectories": True}, None, False),
        ({"chat": {"tool_grammars": "always"}, "trajectories": True}, None, True),
        ({"chat": {"tool_grammars": "never"}}, session(about=untrained), False),
    ):
        where = Desk(CODEC, MODEL.vocab_size, **settings)
        assert bool(grammar_of(where, request_, held)) == follows, settings
        where.ready.capabilities[:] = ["penalties", "json_schema"]
        assert grammar_of(where, request_, held) == ""


def test_calls_always_under_a_grammar_are_refused_in_a_session_to_be_trained() -> None:
    where = Desk(CODEC, MODEL.vocab_size, chat={"tool_grammars": "always"})
    with pytest.raises(TrainabilityError, match="tool_grammar"):
        grammar_of(where, REQUIRED, session())
    (plan,) = where.chat(Asked(Caller(None), sampling(), "c"), REQUIRED)
    assert plan.session is not None
    assert not plan.session.assignment.trainable


def test_free_calls_follow_none_and_a_form_for_the_answer_leaves_room_for_calls(desk: Desk) -> None:
    free = ChatRequest((USER,), TOOLS)
    assert grammar_of(desk, free, None) == ""
    with_form = grammar_of(desk, free, None, json_schema='{"const": "deep"}')
    assert '"deep"' in with_form
    assert "<tool_call>" in with_form
    without = ChatRequest((USER,), TOOLS, ToolChoice("none"))
    (plan,) = desk.chat(Asked(Caller(None), sampling(json_schema="{}"), "c"), without)
    assert (plan.sampling.tool_grammar, plan.sampling.json_schema) == ("", "{}")


def test_a_required_call_goes_with_no_other_demand(desk: Desk) -> None:
    with pytest.raises(InvalidInput, match=r"tools goes with no other demand.*regex"):
        grammar_of(desk, REQUIRED, None, regex="a")


def test_with_choice_none_no_tool_is_offered_or_read(desk: Desk) -> None:
    (plan,) = chat(desk, session(), USER, tools=TOOLS, tool_choice=ToolChoice("none"))
    assert "look" not in text_of(plan)
    piece = desk.answer(
        plan, saying('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    )
    assert piece.message is not None
    assert piece.message.tool_calls == ()
    assert piece.finish == "stop"


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (TOOLS, ToolChoice("named", "sub")),
        ((), ToolChoice("required")),
        ((), ToolChoice("named", "add")),
    ],
)
def test_a_choice_among_no_tools_is_refused(
    desk: Desk, tools: tuple[Any, ...], choice: ToolChoice
) -> None:
    with pytest.raises(InvalidInput, match="tool_choice names no tool"):
        chat(desk, session(), USER, tools=tools, tool_choice=choice)


def test_a_call_cannot_be_forced_where_the_template_spells_none() -> None:
    source = "{{ tools | tojson }}{{ messages[-1].content }}"
    codec = codec_of(byte_level([]), chat_template=source)
    with pytest.raises(InvalidInput, match="shows no tool format"):
        chat(
            Desk(codec, vocab_size(codec)),
            session(),
            USER,
            tools=TOOLS,
            tool_choice=ToolChoice("required"),
        )


def test_a_prefill_begins_the_answer_and_the_history_that_follows(desk: Desk) -> None:
    where = session()
    (plan,) = chat(desk, where, USER, prefill="It is")
    assert text_of(plan).endswith("<|im_start|>assistant\nIt is")
    piece = desk.answer(plan, saying(" 42"))
    assert piece.text == " 42"
    assert piece.message == Message("assistant", "It is 42")
    (after,) = chat(desk, where, USER, Message("assistant", "It is 42"), USER)
    assert after.parent is where.tree.turns[0]
    assert (
        text_of(after)
        == text_of(plan)
        + " 42<|im_end|>\n<|im_start|>user\n12+30=<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prefill_and_a_forced_call_exclude_each_other(desk: Desk) -> None:
    with pytest.raises(InvalidInput, match="cannot begin with a prefill"):
        chat(desk, session(), USER, prefill="It", tools=TOOLS, tool_choice=ToolChoice("required"))


@pytest.fixture
def thinking() -> Desk:
    """Return a desk for a model with prompts that open its thoughts."""
    last = "<|im_start|>assistant\\n' }}{%- endif %}"
    source = CHATML.replace(last, last.replace("\\n'", "\\n<think>\\n'"))
    codec = codec_of(byte_level(["<|im_start|>", "<|im_end|>"]), chat_template=source)
    return Desk(codec, vocab_size(codec))


def test_an_answer_of_a_form_begins_behind_reasoning_that_the_prompt_opened(
    thinking: Desk, desk: Desk
) -> None:
    for where, change, free_until in (
        (thinking, {"regex": "a"}, "</think>"),
        (thinking, {}, ""),
        (desk, {"regex": "a"}, ""),
    ):
        (plan,) = chat(where, None, USER, **change)
        assert plan.sampling.free_until == free_until


def test_an_answer_in_channels_ends_with_a_call_whatever_the_model_lists() -> None:
    codec = codec_of(byte_level(["<|call|>", "<|im_start|>", "<|im_end|>"]), chat_template=CHATML)
    where = Desk(codec, vocab_size(codec), chat={"tool_format": "harmony"})
    call = codec.added_tokens["<|call|>"]
    for change, stops in (
        ({}, (call,)),
        ({"stop_token_ids": [9]}, (9, call)),
        ({"ignore_eos": True}, ()),
    ):
        (plan,) = chat(where, None, USER, **change)
        assert plan.sampling.stop_token_ids == stops
    ((_, *said),) = [codec.encode_piece("x<|channel|>commentary to=f<|message|>{}<|call|>")]
    piece = where.answer(plan, Saying(tuple(said)))
    assert piece.message is not None
    assert [one.name for one in piece.message.tool_calls] == ["f"]


def test_a_prompt_that_opens_thinking_is_led_out_of_it_for_a_forced_call(thinking: Desk) -> None:
    codec = thinking.engine.codec
    (plan,) = chat(thinking, None, USER, tools=TOOLS, tool_choice=ToolChoice("named", "add"))
    beginning = '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments":'
    assert codec.decode_all(plan.prompt).endswith(beginning)
    piece = thinking.answer(plan, Saying(codec.encode_piece(" {}}\n</tool_call>")))
    assert piece.message is not None
    assert [call.name for call in piece.message.tool_calls] == ["add"]
    assert piece.reasoning_tokens == 0


def test_a_prompt_that_opens_thinking_is_led_out_of_it_for_a_prefill(thinking: Desk) -> None:
    codec = thinking.engine.codec
    (plan,) = chat(thinking, None, USER, prefill="It is")
    assert codec.decode_all(plan.prompt).endswith("assistant\n<think>\n\n</think>\n\nIt is")
    assert thinking.answer(plan, Saying(codec.encode_piece(" 42"))).message == Message(
        "assistant", "It is 42"
    )
    (thought,) = chat(thinking, None, USER)
    said = thinking.answer(thought, Saying(codec.encode_piece("hm\n</think>\n\n42"))).message
    assert said == Message("assistant", "42", reasoning="hm")


@pytest.mark.parametrize(
    ("messages", "message"),
    [((), "messages is empty"), ((Message("user", "\ud800"),), "UTF-8")],
)
def test_what_cannot_be_rendered_is_refused_and_opens_nothing(
    desk: Desk, messages: tuple[Message, ...], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        chat(desk, None, *messages)
    assert len(desk.sessions) == 0


def test_a_prompt_that_does_not_fit_is_refused_and_opens_nothing(desk: Desk) -> None:
    desk.ready.max_sequence_tokens = 8
    with pytest.raises(InvalidInput, match="prompt does not fit"):
        chat(desk, None, USER)
    assert len(desk.sessions) == 0


@pytest.mark.parametrize("ids", [[-1], [1 << 20], []])
def test_ids_the_model_does_not_have_are_refused(desk: Desk, ids: list[int]) -> None:
    with pytest.raises(InvalidInput, match="prompt"):
        desk.completions(Asked(Caller(session()), sampling(), "c"), [ids])


def test_a_session_to_be_trained_refuses_what_cannot_be(desk: Desk) -> None:
    where = session()
    with pytest.raises(TrainabilityError, match=r"top_p=0\.5"):
        chat(desk, where, USER, top_p=0.5)
    assert where.generations == 0


def test_a_caller_without_session_is_answered_with_any_sampling_and_then_not_trained(
    desk: Desk,
) -> None:
    (plan,) = chat(desk, None, USER, top_p=0.5)
    assert plan.session is not None
    assert plan.session.assignment == Assignment(desk.config.run.id, implicit=True, trainable=False)
    (trained,) = chat(desk, None, USER)
    assert trained.session is not None
    assert trained.session.assignment.trainable
    assert trained.session is not plan.session


def test_an_implicit_session_goes_on_in_one_of_its_own_when_the_sampling_cannot_be_trained(
    desk: Desk,
) -> None:
    (first,) = chat(desk, None, USER)
    desk.answer(first, saying("42"))
    talk = (USER, Message("assistant", "42"), USER)
    (second,) = chat(desk, None, *talk, top_p=0.5)
    assert second.session not in (None, first.session)
    assert second.session is not None
    assert not second.session.assignment.trainable
    assert second.parent is None
    assert second.prompt[: len(first.prompt)] == first.prompt
    desk.answer(second, saying("84"))
    assert [len(one.session.tree.turns) for one in (first, second) if one.session] == [1, 1]
    (third,) = chat(desk, None, *talk, Message("assistant", "84"), USER)
    assert third.session is second.session
    assert third.parent is second.session.tree.turns[0]


def test_a_conversation_begins_another_session_when_its_own_ends_while_it_is_planned(
    desk: Desk,
) -> None:
    (first,) = chat(desk, None, USER)
    desk.answer(first, saying("42"))
    before = first.session
    assert before is not None

    def end_session(room: int) -> tpb.SamplingParams:
        before.close()
        desk.sessions.remove(before)
        return sampling()(room)

    talk = ChatRequest((USER, Message("assistant", "42"), USER))
    (second,) = desk.chat(Asked(Caller(), end_session, desk.name), talk)
    assert second.session is not None
    assert second.session.state is SessionState.OPEN
    assert second.parent is None
    assert second.prompt[: len(first.prompt)] == first.prompt
    desk.answer(second, saying("84"))
    assert len(second.session.tree.turns) == 1


def test_another_temperature_is_another_session_for_a_caller_without_one(desk: Desk) -> None:
    (first,) = chat(desk, None, USER)
    desk.answer(first, saying("42"))
    talk = (USER, Message("assistant", "42"), USER)
    (second,) = chat(desk, None, *talk, temperature=0.5)
    assert second.session is not None
    assert second.session is not first.session
    assert second.session.assignment.trainable
    assert second.parent is None


def test_completions_without_a_session_open_none(desk: Desk) -> None:
    desk.completions(Asked(Caller(), sampling(), "c"), ["a"])
    assert len(desk.sessions) == 0


def test_quotas_count_all_choices_of_one_request(desk: Desk) -> None:
    where = session(max_parallel=2)
    assert len(chat(desk, where, USER, count=2)) == 2
    with pytest.raises(ResourceExhausted, match="under way; seen: 2; allowed: 2"):
        chat(desk, where, USER, count=3)
    few = session(max_turns=1)
    with pytest.raises(FailedPrecondition, match="used up its generations"):
        chat(desk, few, USER, count=2)
    assert few.generations == 0


def test_a_quota_refuses_callers_without_session_too() -> None:
    desk = Desk(CODEC, MODEL.vocab_size, sessions={"max_turns": 1})
    (plan,) = chat(desk, None, USER)
    desk.answer(plan, saying("42"))
    with pytest.raises(FailedPrecondition, match="used up its generations"):
        chat(desk, None, USER, Message("assistant", "42"), USER)


def test_an_ended_session_plans_nothing(desk: Desk) -> None:
    where = session()
    where.close()
    with pytest.raises(FailedPrecondition, match="has ended"):
        chat(desk, where, USER)


def test_text_that_goes_on_extends_the_tokens_that_were_said(desk: Desk) -> None:
    where = session()

    def planned(prompt: str | list[int]) -> Plan:
        (plan,) = desk.completions(Asked(Caller(where), sampling(), desk.name), [prompt])
        return plan

    first = planned("12+30=")
    odd = tuple(
        CODEC.encode_piece(one)[0] for one in "42"
    )  # other tokens than the tokenizer's for the same text
    desk.answer(first, Saying((*odd, MODEL.end_id)))
    assert planned("12+30=42!").prompt == (
        *first.prompt,
        *odd,
        MODEL.end_id,
        *CODEC.encode_piece("!"),
    )
    assert planned("12+31=42!").parent is None
    ids = [*first.prompt, *odd, MODEL.end_id, 5]
    assert (planned(ids).parent, list(planned(ids).prompt)) == (where.tree.turns[0], ids)
    assert planned(ids[:-2]).parent is None


@pytest.mark.parametrize("finish", ["error", "stop"])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_generation_ends_once_in_its_session_however_it_ends(
    desk: Desk, finish: str, breaks: bool
) -> None:
    where = session()
    (plan,) = chat(desk, where, USER)
    if breaks:
        desk.engine.recorded = lambda plan, generation, turn: 1 / 0  # type: ignore[assignment,method-assign]
    try:
        desk.answer(plan, saying("42", finish))
    except ZeroDivisionError:
        assert (breaks, finish) == (True, "stop")
    assert not where.active
    assert len(where.tree.turns) == (finish == "stop")
    where.begin(plan.sampling, 1)
    assert where.active


def test_a_lost_engine_is_an_error_that_leaves_no_trace(desk: Desk) -> None:
    where = session()
    (plan,) = chat(desk, where, USER)

    def lost(plan: Plan, *, stream: bool) -> Any:
        raise Unavailable("no worker")

    desk.engine.submit = lost  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        desk.answer(plan, saying("42"))
    assert (where.active, where.tree.turns) == (False, [])


@pytest.mark.parametrize(("finish", "aborted"), [("stop", 0), ("error", 1)])
def test_what_a_generation_holds_is_freed_unless_it_is_recorded(
    desk: Desk, finish: str, aborted: int
) -> None:
    (plan,) = chat(desk, session(), USER)
    desk.answer(plan, saying("42", finish))
    assert desk.engine.aborted == aborted


def test_a_reader_that_leaves_frees_the_engine_and_the_session(desk: Desk) -> None:
    where = session()
    (plan,) = chat(desk, where, USER)

    async def leave() -> None:
        pieces = Call(desk.engine, plan).pieces(stream=True)
        generation = desk.engine.submit

        def growing(plan: Plan, *, stream: bool) -> Any:
            begun = generation(plan, stream=stream)
            begun.whole.finish_reason = begun._news.finish_reason = 0
            return begun

        desk.engine.submit = growing  # type: ignore[method-assign]
        await anext(pieces)
        assert where.active
        await pieces.aclose()

    desk.engine.saying = saying("42")
    done(leave())
    assert (where.active, where.tree.turns, desk.engine.aborted) == (False, [], 1)
    assert where.state is SessionState.OPEN


def test_a_turn_is_known_before_its_last_piece_is_given_out(desk: Desk) -> None:
    where = session()
    (plan,) = chat(desk, where, USER)
    desk.engine.saying = saying("42")

    async def run() -> None:
        call = Call(desk.engine, plan)
        async for piece in call.pieces(stream=True):
            if piece.finish:
                assert [turn.message for turn in where.tree.turns] == [call.message]

    done(run())
    assert where.worker_index == 1
