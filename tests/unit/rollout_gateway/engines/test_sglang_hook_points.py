"""Every hook takes what SGLang calls it with, in every release of the table."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from paceline.services.rollout_gateway.engines.sglang import plugin
from paceline.services.rollout_gateway.engines.sglang.hook_points import (
    HOOK_POINTS,
    RELEASES,
    HookPoint,
)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("point", HOOK_POINTS, ids=lambda point: point.hook)
def test_a_hook_takes_the_parameters_of_its_function(point: HookPoint, release: str) -> None:
    module, name = point.hook.split(".")
    hook = getattr(import_module(f"{plugin.__name__}.{module}"), name)
    positional, _, by_name = point.parameters_in(release).partition("*, ")
    given = [one for one in positional.split(", ") if one]
    before = {"BEFORE": ["plugin"], "AROUND": ["plugin", "original"], "AFTER": ["plugin", None]}
    named = dict.fromkeys(one for one in by_name.split(", ") if one)
    inspect.signature(hook).bind(*before[point.kind], *given, **named)


def test_what_has_moved_is_said_of_a_release_of_the_table() -> None:
    assert {release for point in HOOK_POINTS for release in point.moved} <= set(RELEASES)
    assert len({point.target for point in HOOK_POINTS}) == len(HOOK_POINTS)
