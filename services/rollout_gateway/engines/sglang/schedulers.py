"""SGLang's engine as far as we need it. Imports SGLang, so only once its environment is set."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import Engine


class SchedulersAlone(Engine):
    """Without the process that makes text of tokens: our plugin tells the gateway tokens, and the
    few results of SGLang's own requests go back as tokens, too (skip_tokenizer_init).

    That process would import SGLang once more, 8 s of CPU time.
    """

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
        return [], []
