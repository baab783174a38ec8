"""A hook that SGLang did not apply is an error, not a line in its log."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.local.patience import patient

pytestmark = pytest.mark.sglang
SCRIPT = """
from rollout_gateway.engines.sglang.plugin import check_hooks
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


def test_hooks_that_did_not_apply_are_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=patient(120)
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("InternalError")
    assert "json.no_such_function" in first
    assert "json.dumps" not in first
    assert second.startswith("InternalError")
