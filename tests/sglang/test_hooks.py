"""A hook that SGLang did not apply, or that hooks another function than we know, is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sglang_served import CPU_KERNELS

from paceline.local.patience import patient
from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS, RELEASES
from paceline.services.rollout_gateway.engines.sglang.host import check_installed

pytestmark = pytest.mark.sglang
UNAPPLIED = """
from paceline.services.rollout_gateway.engines.sglang.plugin import check_hooks
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
there, gone = "json.dumps", "json.no_such_function"
for target in (there, gone):
    HookRegistry.register(target, lambda original, *a, **k: original(*a, **k), HookType.AROUND)
HookRegistry.apply_hooks()
check_hooks([there])
for targets in ([there, gone], []):
    try:
        check_hooks(targets)
    except Exception as error:
        print(type(error).__name__, error)
"""
PARAMETERS = """
import inspect, json, pkgutil
from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS

STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}

def parameters(function):
    found, by_name = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not by_name:
            found.append("*")
            by_name = True
        found.append(STARS.get(one.kind, "") + one.name)
    return ", ".join(found)

print(json.dumps({one.path: parameters(pkgutil.resolve_name(one.path)) for one in HOOK_POINTS}))
"""


def run(script: str) -> list[str]:
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(CPU_KERNELS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hooks_that_did_not_apply_are_named() -> None:
    first, second = run(UNAPPLIED)
    assert first.startswith("InternalError")
    assert "json.no_such_function" in first
    assert "json.dumps" not in first
    assert second.startswith("InternalError")


def test_the_table_holds_every_hook_point_of_the_installed_release_as_it_is() -> None:
    release = check_installed()
    assert release in RELEASES
    expected = {one.path: one.parameters_in(release) for one in HOOK_POINTS}
    assert json.loads(run(PARAMETERS)[-1]) == expected
