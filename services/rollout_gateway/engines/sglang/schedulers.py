"""Adapts SGLang's Engine for the host. Imports SGLang, so its environment must be set before."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import Engine


class SchedulersAlone(Engine):
    """SGLang's engine without its detokenizer process.

    The plugin sends tokens to the gateway. The few results of SGLang's own requests also return as
    tokens (skip_tokenizer_init). A detokenizer process would import SGLang again, 8 s of CPU time.
    """

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
        return [], []
