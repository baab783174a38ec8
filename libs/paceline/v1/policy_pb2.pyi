from paceline.v1 import tinker_pb2 as _tinker_pb2
from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KeepRanksRequest(_message.Message):
    __slots__ = ("run_id", "node", "rank", "message", "lost")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    node: int
    rank: int
    message: bytes
    lost: str
    def __init__(self, run_id: _Optional[str] = ..., node: _Optional[int] = ..., rank: _Optional[int] = ..., message: _Optional[bytes] = ..., lost: _Optional[str] = ...) -> None: ...

class KeepRanksResponse(_message.Message):
    __slots__ = ("start", "message", "stop_s")
    START_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_S_FIELD_NUMBER: _ClassVar[int]
    start: str
    message: bytes
    stop_s: float
    def __init__(self, start: _Optional[str] = ..., message: _Optional[bytes] = ..., stop_s: _Optional[float] = ...) -> None: ...

class ExpectedGroup(_message.Message):
    __slots__ = ("group_id", "size", "left_out")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    size: int
    left_out: bool
    def __init__(self, group_id: _Optional[str] = ..., size: _Optional[int] = ..., left_out: _Optional[bool] = ...) -> None: ...

class TrainStepRequest(_message.Message):
    __slots__ = ("context", "policy_version", "groups", "slots", "group_deadline_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    policy_version: int
    groups: _containers.RepeatedCompositeFieldContainer[ExpectedGroup]
    slots: _containers.RepeatedScalarFieldContainer[int]
    group_deadline_s: float
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., policy_version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[ExpectedGroup, _Mapping]]] = ..., slots: _Optional[_Iterable[int]] = ..., group_deadline_s: _Optional[float] = ...) -> None: ...

class TrainStepResponse(_message.Message):
    __slots__ = ("batch", "stepped", "prepared")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STEPPED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    batch: BatchReady
    stepped: PolicyStepped
    prepared: PolicyPrepared
    def __init__(self, batch: _Optional[_Union[BatchReady, _Mapping]] = ..., stepped: _Optional[_Union[PolicyStepped, _Mapping]] = ..., prepared: _Optional[_Union[PolicyPrepared, _Mapping]] = ...) -> None: ...

class BatchReady(_message.Message):
    __slots__ = ("trajectories", "dropped", "tokens", "staleness")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    trajectories: int
    dropped: _containers.ScalarMap[str, int]
    tokens: int
    staleness: _containers.ScalarMap[str, int]
    def __init__(self, trajectories: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., tokens: _Optional[int] = ..., staleness: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PolicyStepped(_message.Message):
    __slots__ = ("policy_version", "reward_mean", "reward_std", "train_s", "world_size", "batch_hash", "skipped_updates", "figures", "beyond")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_STD_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_HASH_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    BEYOND_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    reward_mean: float
    reward_std: float
    train_s: float
    world_size: int
    batch_hash: str
    skipped_updates: int
    figures: _containers.ScalarMap[str, float]
    beyond: _containers.RepeatedCompositeFieldContainer[AuditVerdict]
    def __init__(self, policy_version: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_std: _Optional[float] = ..., train_s: _Optional[float] = ..., world_size: _Optional[int] = ..., batch_hash: _Optional[str] = ..., skipped_updates: _Optional[int] = ..., figures: _Optional[_Mapping[str, float]] = ..., beyond: _Optional[_Iterable[_Union[AuditVerdict, _Mapping]]] = ...) -> None: ...

class AuditVerdict(_message.Message):
    __slots__ = ("path", "tokens", "mean", "upper", "mean_bound", "upper_bound")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    MEAN_BOUND_FIELD_NUMBER: _ClassVar[int]
    UPPER_BOUND_FIELD_NUMBER: _ClassVar[int]
    path: str
    tokens: int
    mean: float
    upper: float
    mean_bound: float
    upper_bound: float
    def __init__(self, path: _Optional[str] = ..., tokens: _Optional[int] = ..., mean: _Optional[float] = ..., upper: _Optional[float] = ..., mean_bound: _Optional[float] = ..., upper_bound: _Optional[float] = ...) -> None: ...

class PolicyPrepared(_message.Message):
    __slots__ = ("policy_version", "bytes", "push_s", "lm_head_hash", "replaced")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSH_S_FIELD_NUMBER: _ClassVar[int]
    LM_HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    bytes: int
    push_s: float
    lm_head_hash: str
    replaced: bool
    def __init__(self, policy_version: _Optional[int] = ..., bytes: _Optional[int] = ..., push_s: _Optional[float] = ..., lm_head_hash: _Optional[str] = ..., replaced: _Optional[bool] = ...) -> None: ...

class SavePolicyCheckpointRequest(_message.Message):
    __slots__ = ("context", "evaluation")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    evaluation: float
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., evaluation: _Optional[float] = ...) -> None: ...

class SavePolicyCheckpointResponse(_message.Message):
    __slots__ = ("path", "policy_version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    policy_version: int
    def __init__(self, path: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LearnRequest(_message.Message):
    __slots__ = ("context", "learner", "create", "forward_backward", "optim_step", "save", "publish")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    learner: str
    create: CreateLearner
    forward_backward: _tinker_pb2.TinkerForwardBackward
    optim_step: OptimStep
    save: SaveLearner
    publish: PublishSaved
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., learner: _Optional[str] = ..., create: _Optional[_Union[CreateLearner, _Mapping]] = ..., forward_backward: _Optional[_Union[_tinker_pb2.TinkerForwardBackward, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStep, _Mapping]] = ..., save: _Optional[_Union[SaveLearner, _Mapping]] = ..., publish: _Optional[_Union[PublishSaved, _Mapping]] = ...) -> None: ...

class CreateLearner(_message.Message):
    __slots__ = ("rank", "targets", "seed", "path", "optimizer")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    path: str
    optimizer: bool
    def __init__(self, rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., path: _Optional[str] = ..., optimizer: _Optional[bool] = ...) -> None: ...

class OptimStep(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., clip_norm: _Optional[float] = ...) -> None: ...

class SaveLearner(_message.Message):
    __slots__ = ("path", "number", "weights_only")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    path: str
    number: int
    weights_only: bool
    def __init__(self, path: _Optional[str] = ..., number: _Optional[int] = ..., weights_only: _Optional[bool] = ...) -> None: ...

class PublishSaved(_message.Message):
    __slots__ = ("path", "policy_version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    policy_version: int
    def __init__(self, path: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LearnResponse(_message.Message):
    __slots__ = ("output", "figures", "rank", "targets")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    output: _tinker_pb2.TinkerForwardBackwardOutput
    figures: _containers.ScalarMap[str, float]
    rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, output: _Optional[_Union[_tinker_pb2.TinkerForwardBackwardOutput, _Mapping]] = ..., figures: _Optional[_Mapping[str, float]] = ..., rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ...) -> None: ...
