from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Holder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLDER_UNSPECIFIED: _ClassVar[Holder]
    HOLDER_NONE: _ClassVar[Holder]
    HOLDER_ENGINE: _ClassVar[Holder]
    HOLDER_POLICY: _ClassVar[Holder]
    HOLDER_DRAFTER: _ClassVar[Holder]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_IDLE: _ClassVar[WorkerState]
    WORKER_STATE_GENERATING: _ClassVar[WorkerState]
    WORKER_STATE_RELEASED: _ClassVar[WorkerState]
    WORKER_STATE_TRAINING: _ClassVar[WorkerState]
    WORKER_STATE_COMPLETED: _ClassVar[WorkerState]
    WORKER_STATE_SUSPENDED: _ClassVar[WorkerState]
HOLDER_UNSPECIFIED: Holder
HOLDER_NONE: Holder
HOLDER_ENGINE: Holder
HOLDER_POLICY: Holder
HOLDER_DRAFTER: Holder
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_IDLE: WorkerState
WORKER_STATE_GENERATING: WorkerState
WORKER_STATE_RELEASED: WorkerState
WORKER_STATE_TRAINING: WorkerState
WORKER_STATE_COMPLETED: WorkerState
WORKER_STATE_SUSPENDED: WorkerState

class SlotRange(_message.Message):
    __slots__ = ("first", "count", "holder", "epoch", "worker_state")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_STATE_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    holder: Holder
    epoch: int
    worker_state: WorkerState
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., holder: _Optional[_Union[Holder, str]] = ..., epoch: _Optional[int] = ..., worker_state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("run_id", "step", "total_steps", "phase", "slots", "versions", "last_step", "failure", "away", "paused", "samples_unscored", "promoted_drafter")
    class SamplesUnscoredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    total_steps: int
    phase: str
    slots: _containers.RepeatedCompositeFieldContainer[SlotRange]
    versions: _trajectory_pb2.VersionSet
    last_step: StepRecord
    failure: str
    away: _containers.RepeatedScalarFieldContainer[str]
    paused: bool
    samples_unscored: _containers.ScalarMap[str, int]
    promoted_drafter: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., phase: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., last_step: _Optional[_Union[StepRecord, _Mapping]] = ..., failure: _Optional[str] = ..., away: _Optional[_Iterable[str]] = ..., paused: _Optional[bool] = ..., samples_unscored: _Optional[_Mapping[str, int]] = ..., promoted_drafter: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "versions", "reward_mean", "response_tokens", "rollout_s", "policy_s", "step_s", "accept_length", "arm_rounds", "drafter_steps", "drafter_slot_s", "preempt_wait_s", "policy", "evaluations", "tokens_hash", "near_ties", "finished_at_s", "trace_id", "response_length_quantiles", "slot_s", "staleness", "drafted_rounds", "groups_left_out", "reward_parts", "idle_s", "truncated_share", "groups_solved", "quarantined", "arm_drafted_rounds", "arm_round_tokens", "samples_unscored")
    class ArmRoundsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PolicyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EvaluationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SlotSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RewardPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class IdleSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class GroupsSolvedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ArmDraftedRoundsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ArmRoundTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SamplesUnscoredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ARM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_SLOT_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASH_FIELD_NUMBER: _ClassVar[int]
    NEAR_TIES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_QUANTILES_FIELD_NUMBER: _ClassVar[int]
    SLOT_S_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REWARD_PARTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_SHARE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_SOLVED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ARM_DRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ARM_ROUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    step: int
    versions: _trajectory_pb2.VersionSet
    reward_mean: float
    response_tokens: int
    rollout_s: float
    policy_s: float
    step_s: float
    accept_length: float
    arm_rounds: _containers.ScalarMap[str, int]
    drafter_steps: int
    drafter_slot_s: float
    preempt_wait_s: float
    policy: _containers.ScalarMap[str, float]
    evaluations: _containers.ScalarMap[str, float]
    tokens_hash: str
    near_ties: int
    finished_at_s: float
    trace_id: str
    response_length_quantiles: _containers.RepeatedScalarFieldContainer[int]
    slot_s: _containers.ScalarMap[str, float]
    staleness: _containers.ScalarMap[str, int]
    drafted_rounds: int
    groups_left_out: int
    reward_parts: _containers.ScalarMap[str, float]
    idle_s: _containers.ScalarMap[str, float]
    truncated_share: float
    groups_solved: _containers.ScalarMap[str, int]
    quarantined: _containers.RepeatedScalarFieldContainer[str]
    arm_drafted_rounds: _containers.ScalarMap[str, int]
    arm_round_tokens: _containers.ScalarMap[str, int]
    samples_unscored: _containers.ScalarMap[str, int]
    def __init__(self, step: _Optional[int] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., reward_mean: _Optional[float] = ..., response_tokens: _Optional[int] = ..., rollout_s: _Optional[float] = ..., policy_s: _Optional[float] = ..., step_s: _Optional[float] = ..., accept_length: _Optional[float] = ..., arm_rounds: _Optional[_Mapping[str, int]] = ..., drafter_steps: _Optional[int] = ..., drafter_slot_s: _Optional[float] = ..., preempt_wait_s: _Optional[float] = ..., policy: _Optional[_Mapping[str, float]] = ..., evaluations: _Optional[_Mapping[str, float]] = ..., tokens_hash: _Optional[str] = ..., near_ties: _Optional[int] = ..., finished_at_s: _Optional[float] = ..., trace_id: _Optional[str] = ..., response_length_quantiles: _Optional[_Iterable[int]] = ..., slot_s: _Optional[_Mapping[str, float]] = ..., staleness: _Optional[_Mapping[str, int]] = ..., drafted_rounds: _Optional[int] = ..., groups_left_out: _Optional[int] = ..., reward_parts: _Optional[_Mapping[str, float]] = ..., idle_s: _Optional[_Mapping[str, float]] = ..., truncated_share: _Optional[float] = ..., groups_solved: _Optional[_Mapping[str, int]] = ..., quarantined: _Optional[_Iterable[str]] = ..., arm_drafted_rounds: _Optional[_Mapping[str, int]] = ..., arm_round_tokens: _Optional[_Mapping[str, int]] = ..., samples_unscored: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListStepsRequest(_message.Message):
    __slots__ = ("from_step",)
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    def __init__(self, from_step: _Optional[int] = ...) -> None: ...

class ListStepsResponse(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRunResponse(_message.Message):
    __slots__ = ("total_steps",)
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    total_steps: int
    def __init__(self, total_steps: _Optional[int] = ...) -> None: ...

class PauseRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRunResponse(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ("was_paused",)
    WAS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    was_paused: bool
    def __init__(self, was_paused: _Optional[bool] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("sequence", "context", "at_s", "step_began", "slots", "version_committed", "step_finished", "run_finished", "services_away", "paused")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_BEGAN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FINISHED_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    SERVICES_AWAY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    context: _trajectory_pb2.CommandContext
    at_s: float
    step_began: StepBegan
    slots: _containers.RepeatedCompositeFieldContainer[SlotRange]
    version_committed: VersionCommitted
    step_finished: StepFinished
    run_finished: RunFinished
    services_away: ServicesAway
    paused: bool
    def __init__(self, sequence: _Optional[int] = ..., context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., at_s: _Optional[float] = ..., step_began: _Optional[_Union[StepBegan, _Mapping]] = ..., slots: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., version_committed: _Optional[_Union[VersionCommitted, _Mapping]] = ..., step_finished: _Optional[_Union[StepFinished, _Mapping]] = ..., run_finished: _Optional[_Union[RunFinished, _Mapping]] = ..., services_away: _Optional[_Union[ServicesAway, _Mapping]] = ..., paused: _Optional[bool] = ...) -> None: ...

class StepBegan(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    def __init__(self, samples: _Optional[int] = ...) -> None: ...

class ServicesAway(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, services: _Optional[_Iterable[str]] = ...) -> None: ...

class VersionCommitted(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _trajectory_pb2.VersionSet
    def __init__(self, versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ...) -> None: ...

class StepFinished(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: StepRecord
    def __init__(self, record: _Optional[_Union[StepRecord, _Mapping]] = ...) -> None: ...

class RunFinished(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: str
    def __init__(self, failure: _Optional[str] = ...) -> None: ...
