"""Registers the hooks of hook_points.py in SGLang's processes (entry-point group
sglang.srt.plugins).

SGLang only logs a hook that it cannot apply, and continues. The plugin raises an error instead,
because an engine without one of its hooks behaves differently.
"""

import os
from collections.abc import Collection
from functools import partial
from pkgutil import resolve_name

from paceline.errors import InternalError
from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS
from paceline.services.rollout_gateway.engines.worker import SOCKET_VARIABLE, WorkerSpec


def register() -> None:
    """Entry point. Does nothing in an SGLang that no gateway started."""
    if SOCKET_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from paceline.services.rollout_gateway.engines.sglang.plugin.commands import SchedulerEngine

    plugin = SchedulerEngine(WorkerSpec.read())
    for point in HOOK_POINTS:
        hook = resolve_name(f"{__name__}.{point.hook}")
        HookRegistry.register(point.path, partial(hook, plugin), HookType[point.kind])


def check_hooks(targets: Collection[str]) -> None:
    """Raises InternalError naming the hooks that SGLang did not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(targets) - HookRegistry._patched)
    if missing:
        raise InternalError("SGLang did not apply all hooks of hook_points.py", seen=missing)
