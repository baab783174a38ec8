"""Lists the SGLang functions that the plugin hooks.

Only one release of SGLang is served; another release is rejected by name. This module imports
neither torch nor SGLang.
"""

from typing import Literal, NamedTuple

RELEASE = "0.5.21"
"""The SGLang release that passes tests/sglang."""


class HookPoint(NamedTuple):
    """An SGLang function, and the plugin function that runs before, after or around it."""

    target: str
    """Dotted path below sglang.srt."""
    hook: str
    """Module and function below plugin/."""
    kind: Literal["BEFORE", "AFTER", "AROUND"] = "AROUND"

    @property
    def path(self) -> str:
        """Full dotted path, as SGLang's hook registry names it."""
        return f"sglang.srt.{self.target}"


_SCHEDULER = "managers.scheduler.Scheduler"
_PARTS = "managers.scheduler_components"
_RESULTS = f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor"
_STREAMER = f"{_PARTS}.output_streamer.SchedulerOutputStreamer"
_LOADER = "model_loader.loader.DefaultModelLoader"
_RUNNER = "model_executor.model_runner.ModelRunner"
_ROWS_MODE = "model_executor.forward_batch_info.get_server_return_hidden_states_mode"
_EAGLE = "speculative.eagle_worker_v2.EAGLEWorkerV2"
_DRAFTER = "speculative.eagle_worker_v2.EagleDraftWorker"
_NGRAM = "speculative.ngram_worker.NGRAMWorker"

HOOK_POINTS = (
    HookPoint(f"{_SCHEDULER}.run_event_loop", "commands.start", "BEFORE"),
    HookPoint(
        f"{_PARTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs", "commands.received"
    ),
    HookPoint(f"{_SCHEDULER}.process_input_requests", "commands.processed"),
    HookPoint("managers.tp_worker.TpModelWorker.forward_batch_generation", "commands.forwarding"),
    HookPoint("managers.schedule_batch.Req.update_finish_state", "commands.finishing"),
    HookPoint(f"{_STREAMER}._stream_output_generation", "commands.streaming"),
    HookPoint("layers.sampler.Sampler.forward", "sampling.sample_hook"),
    HookPoint("speculative.eagle_utils.eagle_sample", "sampling.verify_hook"),
    HookPoint(_ROWS_MODE, "capture.full_rows"),
    HookPoint(f"{_LOADER}.load_weights_only", "rounded.loading"),
    HookPoint(f"{_LOADER}.postprocess_weights", "rounded.postprocessed"),
    HookPoint(f"{_RUNNER}.load_model", "capture.model_loaded", "AFTER"),
    HookPoint("layers.logits_processor.LogitsProcessor.forward", "capture.add_last"),
    HookPoint(f"{_RUNNER}.forward", "capture.forwarded"),
    HookPoint("mem_cache.common.release_kv_cache", "capture.released", "BEFORE"),
    HookPoint(f"{_EAGLE}.init_cuda_graphs", "rounds.prepare_eagle"),
    HookPoint(f"{_EAGLE}.forward_batch_generation", "rounds.eagle_round"),
    HookPoint(f"{_DRAFTER}._draft_extend_for_decode", "rounds.eagle_catch_up"),
    HookPoint(f"{_NGRAM}.init_cuda_graphs", "rounds.prepare_ngram"),
    HookPoint(f"{_NGRAM}.forward_batch_generation", "rounds.ngram_round"),
    HookPoint(f"{_NGRAM}._prepare_draft_tokens", "rounds.ngram_drafts"),
    HookPoint(f"{_NGRAM}._update_ngram_corpus", "rounds.ngram_learn"),
    HookPoint(f"{_RESULTS}._resolve_spec_v2_tokens", "rounds.tokens_resolved"),
    HookPoint(f"{_RESULTS}._handle_finish_state_updated_req", "rounds.row_advanced"),
)
"""All hooks in the order of a round: commands, forward and draws, hidden rows, arms, results."""
