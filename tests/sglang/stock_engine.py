"""A child process that starts the unpatched SGLang on the CPU stand-in, generates greedily and
prints JSON.

Standard input: {"engine": arguments, "prompts": lists of token ids, "new_tokens": count}. The last
line of standard output: {"tokens": lists, "rounds": verified per prompt, "accepted": drafts per
prompt, "seconds_to_start": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def main() -> None:
    task: dict[str, Any] = json.load(sys.stdin)
    import sglang

    started = time.monotonic()
    engine = sglang.Engine(
        device="cpu",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        grammar_backend="none",
        max_total_tokens=4096,
        max_running_requests=8,
        speculative_draft_attention_backend="intel_amx",
        **dict.fromkeys(BACKENDS, "intel_amx"),
        **{"dtype": "float32", **task["engine"]},
    )
    ready = time.monotonic()
    sampling = {"temperature": 0.0, "max_new_tokens": task["new_tokens"], "ignore_eos": True}
    answers = engine.generate(input_ids=task["prompts"], sampling_params=sampling)
    report = {
        "tokens": [answer["output_ids"] for answer in answers],
        "seconds_to_start": round(ready - started, 1),
        "seconds_to_generate": round(time.monotonic() - ready, 1),
        "rounds": [answer["meta_info"].get("spec_verify_ct", 0) for answer in answers],
        "accepted": [answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in answers],
    }
    engine.shutdown()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
