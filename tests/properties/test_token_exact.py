"""Agent sessions are exact to the token: samples hold the generated tokens, and nothing is
tokenised twice.

Random dialogues of random clients use chat templates of five families. The model generates
anything: text, calls, thoughts, ids that are no UTF-8, with and without an end of turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from chat_models import MODELS, ChatModel
from dialogue_engine import Desk, Saying, sampling
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from session_turns import session
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.calls.call import Plan
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.sessions.session import Caller, Session
from paceline.services.rollout_gateway.sessions.tree import Turn

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
CALLS = {
    "plain": "add 1 and 2",
    "chatml": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>',
    "thinking": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "headers": '{"name": "add", "parameters": {"a": 1}}',
    "instruct": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
}
GAP = "Gapintherendering"  # the oracle's own mark
characters = st.characters(exclude_categories=["Cs"], exclude_characters="▁")
odd_texts = st.sampled_from(
    [
        "",
        " ",
        "12+30=",
        " lead",
        "trail ",
        "a\nb\n",
        "über 東京 🚲",
        "<|im_end|>",
        "</s>",
        "</think>",
        "Pacelineturn",
        "{{ x }}",
    ]
)
texts = odd_texts | st.text(characters, max_size=8)
# Words that no template strips and no reader takes for something else.
plain_texts = st.lists(
    st.text(st.characters(categories=["L", "N"], exclude_characters="▁"), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
).map(" ".join)
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def rendered(model: ChatModel, request: ChatRequest, *, prompt: bool = True) -> str:
    """The conversation as transformers renders it."""
    (text,), _ = render_jinja_template(
        [[message.shown(parsed=True) for message in request.messages]],
        tools=list(request.tools) or None,
        chat_template=model.template,
        add_generation_prompt=prompt,
        bos_token=model.bos,
        eos_token=model.end,
    )
    return str(text)


def behind(model: ChatModel, request: ChatRequest, index: int) -> str:
    """Return the text that transformers renders after a message's content."""
    messages = list(request.messages)
    messages[index] = Message("assistant", GAP)
    _, after = rendered(model, replace(request, messages=tuple(messages))).split(GAP)
    return after


@st.composite
def sayings(draw: st.DrawFn, model: ChatModel) -> Saying:
    """Draw any output of an engine: at least one token."""
    kind = draw(
        st.sampled_from(
            ["text", "call", "ids"] + ["thought"] * (3 if model.name == "thinking" else 1)
        )
    )
    if kind == "ids":
        ids = draw(st.lists(st.integers(0, model.vocab_size - 1), min_size=1, max_size=6))
    else:
        text = {
            "text": draw(texts),
            "call": CALLS[model.name],
            "thought": "<think>\nhm\n</think>\n\n42",
        }[kind]
        ids = list(model.codec.encode_piece(text))
    if draw(st.booleans()) or not ids:
        ids.append(model.end_id)
    cuts = draw(st.lists(st.integers(0, 3), max_size=3))
    return Saying(tuple(ids), draw(st.sampled_from(["stop", "length"])), tuple(cuts))


@dataclass
class Talk:
    """A conversation as its client holds it."""

    messages: list[Message]
    tools: tuple[Any, ...] = ()
    said: dict[int, Turn] = field(default_factory=dict)
    """Turns with unchanged messages, by message index."""

    @property
    def request(self) -> ChatRequest:
        return ChatRequest(tuple(self.messages), self.tools)

    def change(self, index: int, message: Message) -> None:
        self.messages[index] = message
        self.said = {known: turn for known, turn in self.said.items() if known < index}


@dataclass
class World:
    """One session, its clients and the model that answers them."""

    model: ChatModel
    data: st.DataObject
    desk: Desk
    where: Session
    talks: list[Talk] = field(default_factory=list)

    def step(self) -> None:
        """A client sends a request, gets an answer, and continues or edits its history."""
        new = not self.talks or (len(self.talks) < 3 and self.data.draw(st.integers(0, 4)) == 0)
        if new:
            self.talks.append(self._beginning())
        talk = self.data.draw(st.sampled_from(self.talks))
        try:
            plans = self._planned(talk)
        except InvalidInput as error:
            self._check_refused(talk, error)
            self.talks.remove(talk)
            return
        pairs = [self._answered(plan) for plan in plans]
        self._continue(talk, *self.data.draw(st.sampled_from(pairs)))

    def _check_refused(self, talk: Talk, error: InvalidInput) -> None:
        """Only for the template's own error, and for text beside calls that it would drop."""
        if "text beside tool calls" not in error.message:
            with pytest.raises(TemplateError):
                rendered(self.model, talk.request)
            return
        assert self.model.name in ("headers", "instruct")
        known = max(talk.said, default=-1) if self.model.name == "headers" else -1
        later = talk.messages[known + 1 :]
        assert any(one.tool_calls and one.content.strip() for one in later)

    def _beginning(self) -> Talk:
        system = self.data.draw(
            st.none() | st.sampled_from(["Be exact.", "You are a sub-agent. "]) | texts
        )
        messages = [] if system is None else [Message("system", system)]
        shows = self.model.name != "plain"
        tools = TOOLS if shows and self.data.draw(st.booleans()) else ()
        return Talk([*messages, Message("user", self.data.draw(texts))], tools)

    def _planned(self, talk: Talk) -> list[Plan]:
        count = self.data.draw(st.sampled_from([1, 1, 2]))
        asked = Asked(Caller(self.where), sampling(), self.desk.name, count)
        plans = self.desk.chat(asked, talk.request)
        for plan in plans:
            self._check_extends(talk, plan)
        return plans

    def _check_extends(self, talk: Talk, plan: Plan) -> None:
        """A continued conversation extends its own branch by new tokens only; an edited
        conversation forks.
        """
        codec, deepest = self.model.codec, max(talk.said, default=None)
        if deepest is None:
            assert plan.parent is None
        if plan.parent is None:
            if deepest is not None:  # only where the template refuses the answer without its calls
                assert self.model.name == "instruct"
                assert talk.messages[deepest].tool_calls
            assert plan.prompt == codec.encode_chat(talk.request)
            return
        assert deepest is not None
        assert plan.parent.digest == talk.said[deepest].digest
        known = plan.parent.token_ids
        assert list(plan.prompt[: len(known)]) == known
        assert plan.new_ids == plan.prompt[len(known) :]
        text = behind(self.model, talk.request, deepest)
        if plan.parent.response_ids[-1] == self.model.end_id:
            text = text.removeprefix(self.model.end)
        # After the end token, the first new tokens decode independently of the tokens before.
        end = self.model.end_id
        assert codec.decode_all((end, *plan.new_ids)) == self.model.end + text

    def _answered(self, plan: Plan) -> tuple[Turn, Message]:
        saying = self.data.draw(sayings(self.model))
        piece = self.desk.answer(plan, saying)
        turn = self.where.tree.turns[-1]
        assert turn.parent is plan.parent
        assert turn.response_ids == saying.ids
        assert tuple(turn.token_ids) == (*self.desk.engine.seen[-1], *saying.ids)
        assert piece.message == turn.message is not None
        return turn, piece.message

    def _continue(self, talk: Talk, turn: Turn, message: Message) -> None:
        talk.messages.append(message)
        index = len(talk.messages) - 1
        talk.said[index] = turn
        if message.tool_calls:
            answers = [
                Message("tool", self.data.draw(texts), tool_call_id=one.call_id)
                for one in message.tool_calls
            ]
        else:
            answers = [Message("user", self.data.draw(texts))]
        talk.messages += answers
        self._edit(talk, index)

    def _edit(self, talk: Talk, index: int) -> None:
        """Edit a message of the history as clients do."""
        message = talk.messages[index]
        ways = ["", "", "", "content", "earlier", "again"]
        ways += ["reasoning"] * 4 if message.reasoning else []
        ways += ["calls", "calls", "spelling", "spelling"] if message.tool_calls else []
        match self.data.draw(st.sampled_from(ways)):
            case "content":
                talk.change(index, replace(message, content=message.content + " no"))
            case "reasoning":
                talk.change(index, replace(message, reasoning=""))
            case "calls":
                talk.change(index, with_arguments(message, lambda text: '{"a": 9}'))
            case "spelling":  # the same values, as a client writes them that has read them
                talk.messages[index] = with_arguments(
                    message, lambda text: json.dumps(json.loads(text), indent=1)
                )
            case "earlier":
                at = self.data.draw(
                    st.sampled_from(
                        [i for i, one in enumerate(talk.messages) if one.role == "user"]
                    )
                )
                talk.change(at, replace(talk.messages[at], content=talk.messages[at].content + "?"))
            case "again":
                del talk.messages[index:]
                talk.said.pop(index, None)


def with_arguments(message: Message, change: Callable[[str], str]) -> Message:
    """The same message with other arguments of its calls."""
    calls = tuple(replace(call, arguments=change(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=calls)


@each_model
@settings(max_examples=case_count(40), deadline=None)
@given(data=st.data())
def test_what_was_said_stands_token_for_token_in_everything_that_follows(
    model: ChatModel, data: st.DataObject
) -> None:
    desk, where = Desk(model.codec, model.vocab_size), session()
    world = World(model, data, desk, where)
    for _ in range(data.draw(st.integers(1, 7))):
        world.step()
    check_trained_once(desk, where)


def check_trained_once(desk: Desk, where: Session) -> None:
    """Every generated token has loss in exactly one sample; every sample equals the engine's input
    and output.
    """
    trained: Counter[float] = Counter()
    for sample in where.trajectories():
        trained.update(
            logprob
            for bit, logprob in zip(sample.loss_mask, sample.behavior_logprobs, strict=True)
            if bit
        )
    assert trained == Counter(mark for marks in desk.engine.said for mark in marks)
    paths = {tuple(turn.token_ids) for turn in where.tree.turns if not turn.children}
    assert {sample.token_ids for sample in where.trajectories()} == paths
    by_mark = {turn.behavior_logprobs[0]: turn for turn in where.tree.turns}
    for seen, marks in zip(desk.engine.seen, desk.engine.said, strict=True):
        turn = by_mark[marks[0]]
        assert tuple(turn.token_ids) == (*seen, *turn.response_ids)


@st.composite
def canonical(draw: st.DrawFn, model: ChatModel) -> str:
    """Draw an output that a model spells exactly as its template would."""
    call = CALLS[model.name] if model.name in ("chatml", "headers") else ""
    kind = draw(st.sampled_from(["text", "call", "both"]))
    if not call or kind == "text":
        return draw(plain_texts)
    return call if kind == "call" or model.name == "headers" else f"{draw(plain_texts)}\n{call}"


@pytest.mark.parametrize(
    "model", [one for one in MODELS if not one.rewrites], ids=lambda model: model.name
)
@settings(max_examples=case_count(40), deadline=None)
@given(data=st.data())
def test_a_dialogue_of_canonical_answers_is_the_templates_own_rendering(
    model: ChatModel, data: st.DataObject
) -> None:
    desk, where, codec = Desk(model.codec, model.vocab_size), session(), model.codec
    end = () if model.name == "plain" else (model.end_id,)
    system = data.draw(st.lists(plain_texts.map(lambda text: Message("system", text)), max_size=1))
    tools = () if model.name == "plain" else TOOLS
    request = ChatRequest((*system, Message("user", data.draw(plain_texts))), tools)
    for _ in range(data.draw(st.integers(1, 5))):
        (plan,) = desk.chat(Asked(Caller(where), sampling(), desk.name), request)
        assert codec.decode_all(plan.prompt) == rendered(model, request)
        said = data.draw(canonical(model))
        message = desk.answer(plan, Saying((*codec.encode_piece(said), *end))).message
        assert message is not None
        assert bool(message.tool_calls) == (CALLS[model.name] in said and model.name != "plain")
        request = replace(request, messages=(*request.messages, message))
        path = codec.decode_all(where.tree.turns[-1].token_ids)
        whole = rendered(model, request, prompt=False)
        assert (whole[: len(path)], whole[len(path) :].strip()) == (path, "")
        calls = message.tool_calls
        answers = [
            Message("tool", data.draw(plain_texts), tool_call_id=call.call_id) for call in calls
        ]
        answers = answers or [Message("user", data.draw(plain_texts))]
        request = replace(request, messages=(*request.messages, *answers))
    (sample,) = where.trajectories()
    assert list(sample.token_ids) == where.tree.turns[-1].token_ids


@each_model
@settings(max_examples=case_count(25), deadline=None)
@given(data=st.data())
def test_a_client_without_a_session_is_found_again_by_its_messages(
    model: ChatModel, data: st.DataObject
) -> None:
    desk = Desk(model.codec, model.vocab_size)
    openings = data.draw(st.lists(texts, min_size=2, max_size=3, unique=True))
    talks = [Talk([Message("user", text)]) for text in openings]
    sessions: dict[int, Session] = {}
    last: dict[int, Turn] = {}
    for number in data.draw(st.lists(st.integers(0, len(talks) - 1), min_size=1, max_size=8)):
        talk = talks[number]
        (plan,) = desk.chat(Asked(Caller(), sampling(), desk.name), talk.request)
        assert plan.session is not None
        assert plan.session is sessions.setdefault(number, plan.session)
        assert plan.parent is last.get(number)
        message = desk.answer(plan, data.draw(sayings(model))).message
        assert message is not None
        last[number] = plan.session.tree.turns[-1]
        talk.messages += [message, *following(message, data.draw(texts))]
    assert len(desk.sessions) == len(sessions) == len({one.session_id for one in sessions.values()})
    for one in sessions.values():
        assert len(one.trajectories()) == 1


def following(message: Message, text: str) -> Sequence[Message]:
    """Return the client's next messages."""
    if not message.tool_calls:
        return [Message("user", text)]
    return [Message("tool", text, tool_call_id=call.call_id) for call in message.tool_calls]
