from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]

class WeightTarget(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_TARGET_UNSPECIFIED: _ClassVar[WeightTarget]
    WEIGHT_TARGET_POLICY: _ClassVar[WeightTarget]
    WEIGHT_TARGET_DRAFTER: _ClassVar[WeightTarget]
    WEIGHT_TARGET_POLICY_HEAD: _ClassVar[WeightTarget]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode
PAUSE_MODE_RETRACT: PauseMode
PAUSE_MODE_ABORT: PauseMode
WEIGHT_TARGET_UNSPECIFIED: WeightTarget
WEIGHT_TARGET_POLICY: WeightTarget
WEIGHT_TARGET_DRAFTER: WeightTarget
WEIGHT_TARGET_POLICY_HEAD: WeightTarget

class WorkerCommand(_message.Message):
    __slots__ = ("command_id", "enqueue", "abort", "pause", "prepare_weights", "commit_weights", "abort_weights", "set_speculation", "get_health", "shutdown", "release_memory", "resume_memory", "flush_cache", "quarantine", "learn_arms")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    ENQUEUE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SET_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    GET_HEALTH_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RESUME_MEMORY_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    LEARN_ARMS_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    enqueue: EnqueueRequests
    abort: AbortRequests
    pause: PauseGeneration
    prepare_weights: PrepareWeights
    commit_weights: CommitWeights
    abort_weights: AbortWeights
    set_speculation: SetSpeculation
    get_health: GetHealth
    shutdown: Shutdown
    release_memory: ReleaseMemory
    resume_memory: ResumeMemory
    flush_cache: FlushCache
    quarantine: Quarantine
    learn_arms: LearnArms
    def __init__(self, command_id: _Optional[int] = ..., enqueue: _Optional[_Union[EnqueueRequests, _Mapping]] = ..., abort: _Optional[_Union[AbortRequests, _Mapping]] = ..., pause: _Optional[_Union[PauseGeneration, _Mapping]] = ..., prepare_weights: _Optional[_Union[PrepareWeights, _Mapping]] = ..., commit_weights: _Optional[_Union[CommitWeights, _Mapping]] = ..., abort_weights: _Optional[_Union[AbortWeights, _Mapping]] = ..., set_speculation: _Optional[_Union[SetSpeculation, _Mapping]] = ..., get_health: _Optional[_Union[GetHealth, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., release_memory: _Optional[_Union[ReleaseMemory, _Mapping]] = ..., resume_memory: _Optional[_Union[ResumeMemory, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCache, _Mapping]] = ..., quarantine: _Optional[_Union[Quarantine, _Mapping]] = ..., learn_arms: _Optional[_Union[LearnArms, _Mapping]] = ..., **kwargs) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("command_id", "ready", "tokens", "done", "failed", "health")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    ready: WorkerReady
    tokens: TokensEmitted
    done: CommandDone
    failed: CommandFailed
    health: WorkerHealth
    def __init__(self, command_id: _Optional[int] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., tokens: _Optional[_Union[TokensEmitted, _Mapping]] = ..., done: _Optional[_Union[CommandDone, _Mapping]] = ..., failed: _Optional[_Union[CommandFailed, _Mapping]] = ..., health: _Optional[_Union[WorkerHealth, _Mapping]] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "stream", "capture", "forced_arm", "response_token_ids", "probe")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    FORCED_ARM_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _trajectory_pb2.SamplingParams
    stream: bool
    capture: bool
    forced_arm: str
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    probe: bool
    def __init__(self, request_id: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., stream: _Optional[bool] = ..., capture: _Optional[bool] = ..., forced_arm: _Optional[str] = ..., response_token_ids: _Optional[_Iterable[int]] = ..., probe: _Optional[bool] = ...) -> None: ...

class EnqueueRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[EngineRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[EngineRequest, _Mapping]]] = ...) -> None: ...

class AbortRequests(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PauseGeneration(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class ContinueGeneration(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareWeights(_message.Message):
    __slots__ = ("target", "version", "path", "profile")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    target: WeightTarget
    version: int
    path: str
    profile: str
    def __init__(self, target: _Optional[_Union[WeightTarget, str]] = ..., version: _Optional[int] = ..., path: _Optional[str] = ..., profile: _Optional[str] = ...) -> None: ...

class CommitWeights(_message.Message):
    __slots__ = ("versions", "mode")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    versions: _trajectory_pb2.VersionSet
    mode: PauseMode
    def __init__(self, versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class AbortWeights(_message.Message):
    __slots__ = ("target", "version")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    target: WeightTarget
    version: int
    def __init__(self, target: _Optional[_Union[WeightTarget, str]] = ..., version: _Optional[int] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("arms", "reuse")
    ARMS_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    arms: _containers.RepeatedScalarFieldContainer[str]
    reuse: bool
    def __init__(self, arms: _Optional[_Iterable[str]] = ..., reuse: _Optional[bool] = ...) -> None: ...

class SetSpeculation(_message.Message):
    __slots__ = ("forced_arm",)
    FORCED_ARM_FIELD_NUMBER: _ClassVar[int]
    forced_arm: str
    def __init__(self, forced_arm: _Optional[str] = ...) -> None: ...

class LearnArms(_message.Message):
    __slots__ = ("arms",)
    ARMS_FIELD_NUMBER: _ClassVar[int]
    arms: _containers.RepeatedCompositeFieldContainer[ArmStats]
    def __init__(self, arms: _Optional[_Iterable[_Union[ArmStats, _Mapping]]] = ...) -> None: ...

class GetHealth(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseMemory(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeMemory(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("worker_index", "pid", "versions", "vocab_size", "hidden_size", "max_sequence_tokens", "arms", "capabilities", "lm_head_hash", "row_width", "row_layers", "row_convention", "device_tflops")
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LM_HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROW_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROW_CONVENTION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TFLOPS_FIELD_NUMBER: _ClassVar[int]
    worker_index: int
    pid: int
    versions: _trajectory_pb2.VersionSet
    vocab_size: int
    hidden_size: int
    max_sequence_tokens: int
    arms: _containers.RepeatedScalarFieldContainer[str]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    lm_head_hash: str
    row_width: int
    row_layers: str
    row_convention: str
    device_tflops: float
    def __init__(self, worker_index: _Optional[int] = ..., pid: _Optional[int] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., arms: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Iterable[str]] = ..., lm_head_hash: _Optional[str] = ..., row_width: _Optional[int] = ..., row_layers: _Optional[str] = ..., row_convention: _Optional[str] = ..., device_tflops: _Optional[float] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("request_id", "token_ids", "behavior_logprobs", "version_spans", "finish_reason", "error", "speculation", "cached_prompt_tokens", "smallest_gap", "top_logprobs", "time_to_first_token_s", "matched_stop", "draw_spans", "stages", "prompt_scores", "accepted_drafts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SMALLEST_GAP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    DRAW_SPANS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    behavior_logprobs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    finish_reason: _trajectory_pb2.FinishReason
    error: str
    speculation: _trajectory_pb2.SpeculationStats
    cached_prompt_tokens: int
    smallest_gap: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    time_to_first_token_s: float
    matched_stop: str
    draw_spans: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.DrawSpan]
    stages: _containers.RepeatedCompositeFieldContainer[StageTime]
    prompt_scores: _containers.RepeatedCompositeFieldContainer[PromptScore]
    accepted_drafts: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., behavior_logprobs: _Optional[_Iterable[float]] = ..., version_spans: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_trajectory_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., speculation: _Optional[_Union[_trajectory_pb2.SpeculationStats, _Mapping]] = ..., cached_prompt_tokens: _Optional[int] = ..., smallest_gap: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., time_to_first_token_s: _Optional[float] = ..., matched_stop: _Optional[str] = ..., draw_spans: _Optional[_Iterable[_Union[_trajectory_pb2.DrawSpan, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., prompt_scores: _Optional[_Iterable[_Union[PromptScore, _Mapping]]] = ..., accepted_drafts: _Optional[_Iterable[bool]] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "arm", "policy_version", "start_ns", "end_ns", "busy_s", "rounds", "tokens")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    arm: str
    policy_version: int
    start_ns: int
    end_ns: int
    busy_s: float
    rounds: int
    tokens: int
    def __init__(self, stage: _Optional[str] = ..., arm: _Optional[str] = ..., policy_version: _Optional[int] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., busy_s: _Optional[float] = ..., rounds: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PromptScore(_message.Message):
    __slots__ = ("logprob", "rank", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top: TopLogprobs
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Union[TopLogprobs, _Mapping]] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokensEmitted(_message.Message):
    __slots__ = ("chunks", "rows_written", "rows_dropped")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ROWS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[TokenChunk]
    rows_written: int
    rows_dropped: int
    def __init__(self, chunks: _Optional[_Iterable[_Union[TokenChunk, _Mapping]]] = ..., rows_written: _Optional[int] = ..., rows_dropped: _Optional[int] = ...) -> None: ...

class CommandDone(_message.Message):
    __slots__ = ("released_bytes",)
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ...) -> None: ...

class CommandFailed(_message.Message):
    __slots__ = ("reason", "message", "family")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    family: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., family: _Optional[str] = ...) -> None: ...

class ArmStats(_message.Message):
    __slots__ = ("arm", "batch_group", "pulls", "explorations", "mean_tokens_per_s", "mean_accept_length", "drafter_deaths")
    ARM_FIELD_NUMBER: _ClassVar[int]
    BATCH_GROUP_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    EXPLORATIONS_FIELD_NUMBER: _ClassVar[int]
    MEAN_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    arm: str
    batch_group: int
    pulls: int
    explorations: int
    mean_tokens_per_s: float
    mean_accept_length: float
    drafter_deaths: int
    def __init__(self, arm: _Optional[str] = ..., batch_group: _Optional[int] = ..., pulls: _Optional[int] = ..., explorations: _Optional[int] = ..., mean_tokens_per_s: _Optional[float] = ..., mean_accept_length: _Optional[float] = ..., drafter_deaths: _Optional[int] = ...) -> None: ...

class RoundSplit(_message.Message):
    __slots__ = ("rounds", "nodes", "prefill_s", "draft_s", "forward_s", "sample_s", "keep_s")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    nodes: int
    prefill_s: float
    draft_s: float
    forward_s: float
    sample_s: float
    keep_s: float
    def __init__(self, rounds: _Optional[int] = ..., nodes: _Optional[int] = ..., prefill_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., sample_s: _Optional[float] = ..., keep_s: _Optional[float] = ...) -> None: ...

class PrefixStats(_message.Message):
    __slots__ = ("prompt_tokens", "reused_tokens", "lookups", "lookup_s", "copy_s")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_S_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    reused_tokens: int
    lookups: int
    lookup_s: float
    copy_s: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., lookups: _Optional[int] = ..., lookup_s: _Optional[float] = ..., copy_s: _Optional[float] = ...) -> None: ...

class WorkerHealth(_message.Message):
    __slots__ = ("running", "waiting", "versions", "tokens_emitted", "busy_s", "speculation", "arms", "rows_dropped", "prefixes", "split", "rows_invalid")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_EMITTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    ROWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ROWS_INVALID_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    versions: _trajectory_pb2.VersionSet
    tokens_emitted: int
    busy_s: float
    speculation: _trajectory_pb2.SpeculationStats
    arms: _containers.RepeatedCompositeFieldContainer[ArmStats]
    rows_dropped: int
    prefixes: PrefixStats
    split: RoundSplit
    rows_invalid: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., tokens_emitted: _Optional[int] = ..., busy_s: _Optional[float] = ..., speculation: _Optional[_Union[_trajectory_pb2.SpeculationStats, _Mapping]] = ..., arms: _Optional[_Iterable[_Union[ArmStats, _Mapping]]] = ..., rows_dropped: _Optional[int] = ..., prefixes: _Optional[_Union[PrefixStats, _Mapping]] = ..., split: _Optional[_Union[RoundSplit, _Mapping]] = ..., rows_invalid: _Optional[int] = ...) -> None: ...
