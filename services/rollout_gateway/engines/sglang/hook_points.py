"""Lists the SGLang functions that the plugin hooks, with their parameters in each release.

Another release of SGLang can break only entries of this table. Releases outside RELEASES are
rejected by name. This module imports neither torch nor SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RELEASES = ("0.5.21", "0.5.23")
"""SGLang releases that pass tests/sglang. Setup installs the first release unless another is named.
"""


@dataclass(frozen=True, slots=True)
class HookPoint:
    """An SGLang function, and the plugin function that runs before, after or around it."""

    target: str
    """Dotted path below sglang.srt."""
    kind: Literal["BEFORE", "AFTER", "AROUND"]
    hook: str
    """Module and function below plugin/."""
    parameters: str = ""
    """Parameter names of the SGLang function; a star precedes its keyword-only parameters."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Parameter names by release, for releases in which they differ from `parameters`."""

    @property
    def path(self) -> str:
        """Full dotted path, as SGLang's hook registry names it."""
        return f"sglang.srt.{self.target}"

    def parameters_in(self, release: str) -> str:
        """Parameter names in a release of SGLang."""
        return self.moved.get(release, self.parameters)


_PARTS = "managers.scheduler_components"
_RESULTS = f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor"
_EAGLE = "speculative.eagle_worker_v2"
_NGRAM = "speculative.ngram_worker.NGRAMWorker"
_FORWARD = (
    "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init,"
    " *, capture_hidden_mode"
)
_SAMPLE = (
    "self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs,"
    " positions"
)
_VERIFY = "verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k"

HOOK_POINTS = (
    HookPoint("managers.scheduler.Scheduler.run_event_loop", "BEFORE", "loop.start", "self"),
    HookPoint(
        f"{_PARTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "AROUND",
        "loop.received",
        "self",
    ),
    HookPoint(
        "managers.scheduler.Scheduler.process_input_requests",
        "AROUND",
        "loop.processed",
        "self, recv_reqs",
    ),
    HookPoint(
        "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "AROUND",
        "loop.forwarding",
        _FORWARD,
        {"0.5.23": f"{_FORWARD}, return_kv_loc_plan"},
    ),
    HookPoint(
        "managers.schedule_batch.Req.update_finish_state",
        "AROUND",
        "loop.finishing",
        "self, new_accepted_len",
    ),
    HookPoint(
        f"{_PARTS}.output_streamer.SchedulerOutputStreamer._stream_output_generation",
        "AROUND",
        "loop.streaming",
        "self, reqs, return_logprob, skip_req, is_idle_batch",
    ),
    HookPoint(
        "layers.sampler.Sampler.forward",
        "AROUND",
        "sampling.sample_hook",
        _SAMPLE,
        {"0.5.23": f"{_SAMPLE}, *, logprob_logits"},
    ),
    HookPoint(
        "speculative.eagle_utils.eagle_sample",
        "AROUND",
        "sampling.verify_hook",
        _VERIFY,
        {"0.5.23": f"{_VERIFY}, *, watermark_state, watermark_full_mask"},
    ),
    HookPoint(
        "model_executor.forward_batch_info.get_server_return_hidden_states_mode",
        "AROUND",
        "capture.full_rows",
    ),
    HookPoint(
        "model_loader.loader.DefaultModelLoader.load_weights_only",
        "AROUND",
        "rounded.loading",
        "model, weights, target_device",
    ),
    HookPoint(
        "model_loader.loader.DefaultModelLoader.postprocess_weights",
        "AROUND",
        "rounded.postprocessed",
        "model, target_device",
    ),
    HookPoint(
        "model_executor.model_runner.ModelRunner.load_model",
        "AFTER",
        "capture.model_loaded",
        "self",
    ),
    HookPoint(
        "layers.logits_processor.LogitsProcessor.forward",
        "AROUND",
        "capture.add_last",
        "self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states,"
        " hidden_states_before_norm",
    ),
    HookPoint(
        "model_executor.model_runner.ModelRunner.forward",
        "AROUND",
        "capture.forwarded",
        "self, forward_batch, skip_attn_backend_init, pp_proxy_tensors, reinit_attn_backend,"
        " split_forward_count",
    ),
    HookPoint(
        "mem_cache.common.release_kv_cache",
        "BEFORE",
        "capture.released",
        "req, tree_cache, is_insert",
        {"0.5.23": "req, tree_cache, *, checkpoint"},
    ),
    HookPoint(f"{_EAGLE}.EAGLEWorkerV2.init_cuda_graphs", "AROUND", "rounds.prepare_eagle", "self"),
    HookPoint(
        f"{_EAGLE}.EAGLEWorkerV2.forward_batch_generation",
        "AROUND",
        "rounds.eagle_round",
        "self, batch, on_publish, grammar_barrier, pp_proxy_tensors",
    ),
    HookPoint(
        f"{_EAGLE}.EagleDraftWorker._draft_extend_for_decode",
        "AROUND",
        "rounds.eagle_catch_up",
        "self, batch, batch_result",
        {"0.5.23": "self, batch, batch_result, *, kv_loc_plan"},
    ),
    HookPoint(f"{_NGRAM}.init_cuda_graphs", "AROUND", "rounds.prepare_ngram", "self"),
    HookPoint(
        f"{_NGRAM}.forward_batch_generation",
        "AROUND",
        "rounds.ngram_round",
        "self, batch, on_publish, pp_proxy_tensors",
    ),
    HookPoint(f"{_NGRAM}._prepare_draft_tokens", "AROUND", "rounds.ngram_drafts", "self, batch"),
    HookPoint(f"{_NGRAM}._update_ngram_corpus", "AROUND", "rounds.ngram_learn", "self, batch"),
    HookPoint(
        f"{_RESULTS}._resolve_spec_v2_tokens",
        "AROUND",
        "rounds.tokens_resolved",
        "self, result, batch",
    ),
    HookPoint(
        f"{_RESULTS}._handle_finish_state_updated_req",
        "AROUND",
        "rounds.row_advanced",
        "self, req, batch, result, i, logits_output",
    ),
)
"""All hooks in the order of a round: commands, forward and draws, hidden rows, arms, results."""
