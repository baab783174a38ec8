from paceline.v1 import engine_pb2 as _engine_pb2
from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "text", "token_ids", "sampling", "forced_arm", "return_prompt_token_ids", "add_special_tokens", "capture_group")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FORCED_ARM_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_GROUP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    text: str
    token_ids: TokenIds
    sampling: _trajectory_pb2.SamplingParams
    forced_arm: str
    return_prompt_token_ids: bool
    add_special_tokens: bool
    capture_group: str
    def __init__(self, session_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., forced_arm: _Optional[str] = ..., return_prompt_token_ids: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ..., capture_group: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunk", "text", "prompt_tokens", "versions", "completion_id", "prompt_token_ids", "overridden")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OVERRIDDEN_FIELD_NUMBER: _ClassVar[int]
    chunk: _engine_pb2.TokenChunk
    text: str
    prompt_tokens: int
    versions: _trajectory_pb2.VersionSet
    completion_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    overridden: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, chunk: _Optional[_Union[_engine_pb2.TokenChunk, _Mapping]] = ..., text: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., completion_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., overridden: _Optional[_Iterable[str]] = ...) -> None: ...

class TaskSpec(_message.Message):
    __slots__ = ("task_id", "prompt", "answer", "group_id", "task_index", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    prompt: str
    answer: str
    group_id: str
    task_index: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, task_id: _Optional[str] = ..., prompt: _Optional[str] = ..., answer: _Optional[str] = ..., group_id: _Optional[str] = ..., task_index: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunTasksRequest(_message.Message):
    __slots__ = ("context", "purpose", "tasks", "samples_per_task", "sampling", "run_seed", "environment", "reward", "forced_arm", "capture", "open_groups", "assigned", "silence_s", "arms", "turn_discount")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_TASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FORCED_ARM_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    OPEN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    TURN_DISCOUNT_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    purpose: _trajectory_pb2.Purpose
    tasks: _containers.RepeatedCompositeFieldContainer[TaskSpec]
    samples_per_task: int
    sampling: _trajectory_pb2.SamplingParams
    run_seed: int
    environment: str
    reward: str
    forced_arm: str
    capture: bool
    open_groups: int
    assigned: bool
    silence_s: float
    arms: _containers.RepeatedCompositeFieldContainer[_engine_pb2.ArmStats]
    turn_discount: float
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., purpose: _Optional[_Union[_trajectory_pb2.Purpose, str]] = ..., tasks: _Optional[_Iterable[_Union[TaskSpec, _Mapping]]] = ..., samples_per_task: _Optional[int] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., run_seed: _Optional[int] = ..., environment: _Optional[str] = ..., reward: _Optional[str] = ..., forced_arm: _Optional[str] = ..., capture: _Optional[bool] = ..., open_groups: _Optional[int] = ..., assigned: _Optional[bool] = ..., silence_s: _Optional[float] = ..., arms: _Optional[_Iterable[_Union[_engine_pb2.ArmStats, _Mapping]]] = ..., turn_discount: _Optional[float] = ...) -> None: ...

class WatchGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchGroupsResponse(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: int
    def __init__(self, closed: _Optional[int] = ...) -> None: ...

class AssignGroupsRequest(_message.Message):
    __slots__ = ("context", "most", "last")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    most: int
    last: bool
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., most: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class AssignGroupsResponse(_message.Message):
    __slots__ = ("assigned",)
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    assigned: int
    def __init__(self, assigned: _Optional[int] = ...) -> None: ...

class RunTasksResponse(_message.Message):
    __slots__ = ("sample", "share", "finished", "closed")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    sample: SampleFinished
    share: ShareDone
    finished: TasksFinished
    closed: ClosedGroup
    def __init__(self, sample: _Optional[_Union[SampleFinished, _Mapping]] = ..., share: _Optional[_Union[ShareDone, _Mapping]] = ..., finished: _Optional[_Union[TasksFinished, _Mapping]] = ..., closed: _Optional[_Union[ClosedGroup, _Mapping]] = ...) -> None: ...

class SampleFinished(_message.Message):
    __slots__ = ("task_id", "group_id", "sample_index", "worker_index", "reward", "prompt_tokens", "response_tokens", "finish_reason", "speculation", "smallest_gap", "tokens_hash", "session_id")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SMALLEST_GAP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    group_id: str
    sample_index: int
    worker_index: int
    reward: _trajectory_pb2.Reward
    prompt_tokens: int
    response_tokens: int
    finish_reason: _trajectory_pb2.FinishReason
    speculation: _trajectory_pb2.SpeculationStats
    smallest_gap: float
    tokens_hash: str
    session_id: str
    def __init__(self, task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., worker_index: _Optional[int] = ..., reward: _Optional[_Union[_trajectory_pb2.Reward, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_trajectory_pb2.FinishReason, str]] = ..., speculation: _Optional[_Union[_trajectory_pb2.SpeculationStats, _Mapping]] = ..., smallest_gap: _Optional[float] = ..., tokens_hash: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ShareDone(_message.Message):
    __slots__ = ("worker_index", "samples", "response_tokens", "elapsed_s")
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    worker_index: int
    samples: int
    response_tokens: int
    elapsed_s: float
    def __init__(self, worker_index: _Optional[int] = ..., samples: _Optional[int] = ..., response_tokens: _Optional[int] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class ClosedGroup(_message.Message):
    __slots__ = ("group_id", "scored_sessions", "equal_rewards")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SCORED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EQUAL_REWARDS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    scored_sessions: int
    equal_rewards: bool
    def __init__(self, group_id: _Optional[str] = ..., scored_sessions: _Optional[int] = ..., equal_rewards: _Optional[bool] = ...) -> None: ...

class TasksFinished(_message.Message):
    __slots__ = ("scored", "unscored", "response_tokens", "rollout_s", "speculation", "arms", "versions", "regret", "closed_groups")
    SCORED_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_S_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REGRET_FIELD_NUMBER: _ClassVar[int]
    CLOSED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    scored: int
    unscored: int
    response_tokens: int
    rollout_s: float
    speculation: _trajectory_pb2.SpeculationStats
    arms: _containers.RepeatedCompositeFieldContainer[_engine_pb2.ArmStats]
    versions: _trajectory_pb2.VersionSet
    regret: float
    closed_groups: _containers.RepeatedCompositeFieldContainer[ClosedGroup]
    def __init__(self, scored: _Optional[int] = ..., unscored: _Optional[int] = ..., response_tokens: _Optional[int] = ..., rollout_s: _Optional[float] = ..., speculation: _Optional[_Union[_trajectory_pb2.SpeculationStats, _Mapping]] = ..., arms: _Optional[_Iterable[_Union[_engine_pb2.ArmStats, _Mapping]]] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., regret: _Optional[float] = ..., closed_groups: _Optional[_Iterable[_Union[ClosedGroup, _Mapping]]] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("context", "paths")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., paths: _Optional[_Iterable[str]] = ...) -> None: ...

class QuarantineResponse(_message.Message):
    __slots__ = ("unmet",)
    UNMET_FIELD_NUMBER: _ClassVar[int]
    unmet: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unmet: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseWorkersRequest(_message.Message):
    __slots__ = ("context", "workers", "drain_s", "outlasts_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    OUTLASTS_S_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    workers: _containers.RepeatedScalarFieldContainer[int]
    drain_s: float
    outlasts_s: float
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., workers: _Optional[_Iterable[int]] = ..., drain_s: _Optional[float] = ..., outlasts_s: _Optional[float] = ...) -> None: ...

class ReleaseWorkersResponse(_message.Message):
    __slots__ = ("released_bytes",)
    class ReleasedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: _containers.ScalarMap[int, int]
    def __init__(self, released_bytes: _Optional[_Mapping[int, int]] = ...) -> None: ...

class ResumeWorkersRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ...) -> None: ...

class ResumeWorkersResponse(_message.Message):
    __slots__ = ("workers", "versions")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    versions: _trajectory_pb2.VersionSet
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ...) -> None: ...

class WatchTrafficRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchTrafficResponse(_message.Message):
    __slots__ = ("epoch", "requests", "workers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    requests: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., requests: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_index", "pid", "ready", "health")
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    worker_index: int
    pid: int
    ready: bool
    health: _engine_pb2.WorkerHealth
    def __init__(self, worker_index: _Optional[int] = ..., pid: _Optional[int] = ..., ready: _Optional[bool] = ..., health: _Optional[_Union[_engine_pb2.WorkerHealth, _Mapping]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("workers", "versions", "open_sessions", "unsent_bytes", "feature_batches", "feature_rows_dropped", "model")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UNSENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BATCHES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    versions: _trajectory_pb2.VersionSet
    open_sessions: int
    unsent_bytes: int
    feature_batches: int
    feature_rows_dropped: int
    model: str
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., open_sessions: _Optional[int] = ..., unsent_bytes: _Optional[int] = ..., feature_batches: _Optional[int] = ..., feature_rows_dropped: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...
