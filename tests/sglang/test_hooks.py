"""Errors for a hook that SGLang did not apply, and for a changed signature of a hooked function."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sglang_served import CPU_KERNELS

from paceline.local.patience import patient
from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS, RELEASE
from paceline.services.rollout_gateway.engines.sglang.host import check_installed

pytestmark = pytest.mark.sglang
SCRIPT = """
import inspect, pkgutil
from importlib import import_module
from paceline.services.rollout_gateway.engines.sglang import plugin
from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS
from paceline.services.rollout_gateway.engines.sglang.plugin import check_hooks
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
there, gone = "json.dumps", "json.no_such_function"
for target in (there, gone):
    HookRegistry.register(target, lambda original, *a, **k: original(*a, **k), HookType.AROUND)
HookRegistry.apply_hooks()
check_hooks([there])
try:
    check_hooks([there, gone])
except Exception as error:
    print(type(error).__name__, error)

BEFORE = {"BEFORE": ["plugin"], "AROUND": ["plugin", "original"], "AFTER": ["plugin", None]}
for point in HOOK_POINTS:
    module, name = point.hook.split(".")
    hook = getattr(import_module(f"{plugin.__name__}.{module}"), name)
    given = inspect.signature(pkgutil.resolve_name(point.path)).parameters.values()
    by_name = {one.name: None for one in given if one.kind is one.KEYWORD_ONLY}
    inspect.signature(hook).bind(*BEFORE[point.kind], *(one for one in given if one.name not in by_name), **by_name)
    print(point.hook)
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Output of one process that has imported SGLang: the error, then the hooks that bind."""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(CPU_KERNELS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hooks_that_did_not_apply_are_named(lines: list[str]) -> None:
    first, *_ = lines
    assert first.startswith("InternalError")
    assert "json.no_such_function" in first
    assert "json.dumps" not in first


def test_every_hook_takes_the_parameters_of_its_function(lines: list[str]) -> None:
    assert check_installed() == RELEASE
    assert lines[1:] == [point.hook for point in HOOK_POINTS]
