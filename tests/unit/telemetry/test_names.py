"""Spans and their attributes are named in one module, with the agreed spelling."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.telemetry import names

ROOT = Path(__file__).parents[3]
MAKERS = {"span", "open_span", "past_span", "start_span", "start_as_current_span"}
CONVENTIONS = ("error.", "http.", "rpc.", "server.", "messaging.", "gen_ai.")


def literals(source: str) -> Iterator[str]:
    """Names of spans and attributes that the source spells itself."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in MAKERS:
            about = [*node.args[1:2], *(one.value for one in node.keywords)]
            keys = [key for one in about if isinstance(one, ast.Dict) for key in one.keys]
        elif called == "set_attribute":
            keys = []
        else:
            continue
        for spelled in (*node.args[:1], *keys):
            if isinstance(spelled, ast.Constant | ast.JoinedStr):
                yield ast.unparse(spelled)


def test_a_name_that_is_spelled_where_it_is_used_is_found() -> None:
    source = 'span("a", {"b": 1})\nx.set_attribute(f"c.{d}", 1)\nspan(names.STEP, {names.RUN: 1})'
    assert list(literals(source)) == ["'a'", "'b'", "f'c.{d}'"]


@pytest.mark.slow
@pytest.mark.parametrize("root", ["libs/paceline", "services", "benchmarks"])
def test_nobody_spells_the_name_of_a_span_or_attribute(root: str) -> None:
    spelled = {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / root).rglob("*.py")
        if (found := list(literals(path.read_text(encoding="utf-8"))))
    }
    assert spelled == {}


def test_attributes_are_those_of_the_conventions_or_of_reinforcement_learning() -> None:
    values = [
        value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)
    ]
    spans = ("step", "reward.remote", "http.request", "agent.session")
    services = ("rollout.", "trajectory.", "features.", "engine.", "workers.", "weights.")
    trainers = ("policy.", "drafter.")
    prefixes = ("rl.", *CONVENTIONS, *services, *trainers)
    words = (names.PROVIDER, names.CHAT, names.TEXT_COMPLETION)
    assert [
        one for one in values if not one.startswith(prefixes) and one not in spans + words
    ] == []
    assert len(set(values)) == len(values)
