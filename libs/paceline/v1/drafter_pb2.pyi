from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ActivateRequest(_message.Message):
    __slots__ = ("context", "slots", "deadline_s", "versions", "max_steps", "round_costs", "accept_lengths")
    class AcceptLengthsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_COSTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    slots: _containers.RepeatedScalarFieldContainer[int]
    deadline_s: float
    versions: _trajectory_pb2.VersionSet
    max_steps: int
    round_costs: _containers.RepeatedCompositeFieldContainer[RoundCosts]
    accept_lengths: _containers.ScalarMap[str, float]
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., slots: _Optional[_Iterable[int]] = ..., deadline_s: _Optional[float] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., max_steps: _Optional[int] = ..., round_costs: _Optional[_Iterable[_Union[RoundCosts, _Mapping]]] = ..., accept_lengths: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RoundCosts(_message.Message):
    __slots__ = ("batch_group", "share", "costs", "rival")
    class CostsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BATCH_GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    RIVAL_FIELD_NUMBER: _ClassVar[int]
    batch_group: int
    share: float
    costs: _containers.ScalarMap[str, float]
    rival: float
    def __init__(self, batch_group: _Optional[int] = ..., share: _Optional[float] = ..., costs: _Optional[_Mapping[str, float]] = ..., rival: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("context", "slots")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("join_s", "world_size")
    JOIN_S_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    join_s: float
    world_size: int
    def __init__(self, join_s: _Optional[float] = ..., world_size: _Optional[int] = ...) -> None: ...

class ActivateResponse(_message.Message):
    __slots__ = ("activated", "gate", "detached")
    ACTIVATED_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    activated: Activated
    gate: GateDecision
    detached: Detached
    def __init__(self, activated: _Optional[_Union[Activated, _Mapping]] = ..., gate: _Optional[_Union[GateDecision, _Mapping]] = ..., detached: _Optional[_Union[Detached, _Mapping]] = ...) -> None: ...

class Activated(_message.Message):
    __slots__ = ("attach_s", "world_size")
    ATTACH_S_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    attach_s: float
    world_size: int
    def __init__(self, attach_s: _Optional[float] = ..., world_size: _Optional[int] = ...) -> None: ...

class GateDecision(_message.Message):
    __slots__ = ("drafter_version", "promoted", "candidate_accept_length", "serving_accept_length", "noise", "policy_version", "positions", "optimizer_steps", "decision", "kind", "candidate_speedup", "serving_speedup", "speedup_noise", "costs_measured", "temperature", "survival", "serving_survival")
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SERVING_ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    SERVING_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_NOISE_FIELD_NUMBER: _ClassVar[int]
    COSTS_MEASURED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    SERVING_SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    promoted: bool
    candidate_accept_length: float
    serving_accept_length: float
    noise: float
    policy_version: int
    positions: int
    optimizer_steps: int
    decision: str
    kind: str
    candidate_speedup: float
    serving_speedup: float
    speedup_noise: float
    costs_measured: bool
    temperature: float
    survival: _containers.RepeatedScalarFieldContainer[float]
    serving_survival: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, drafter_version: _Optional[int] = ..., promoted: _Optional[bool] = ..., candidate_accept_length: _Optional[float] = ..., serving_accept_length: _Optional[float] = ..., noise: _Optional[float] = ..., policy_version: _Optional[int] = ..., positions: _Optional[int] = ..., optimizer_steps: _Optional[int] = ..., decision: _Optional[str] = ..., kind: _Optional[str] = ..., candidate_speedup: _Optional[float] = ..., serving_speedup: _Optional[float] = ..., speedup_noise: _Optional[float] = ..., costs_measured: _Optional[bool] = ..., temperature: _Optional[float] = ..., survival: _Optional[_Iterable[float]] = ..., serving_survival: _Optional[_Iterable[float]] = ...) -> None: ...

class Detached(_message.Message):
    __slots__ = ("reason", "steps", "micro_batches", "tokens", "loss", "busy_s", "total_steps", "dropped", "first_step_s")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    steps: int
    micro_batches: int
    tokens: int
    loss: float
    busy_s: float
    total_steps: int
    dropped: _containers.ScalarMap[str, int]
    first_step_s: float
    def __init__(self, reason: _Optional[str] = ..., steps: _Optional[int] = ..., micro_batches: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., busy_s: _Optional[float] = ..., total_steps: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., first_step_s: _Optional[float] = ...) -> None: ...

class PreemptRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ...) -> None: ...

class PreemptResponse(_message.Message):
    __slots__ = ("stopped_after_s", "was_active")
    STOPPED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    WAS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    stopped_after_s: float
    was_active: bool
    def __init__(self, stopped_after_s: _Optional[float] = ..., was_active: _Optional[bool] = ...) -> None: ...

class SaveDrafterCheckpointRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ...) -> None: ...

class SaveDrafterCheckpointResponse(_message.Message):
    __slots__ = ("path", "total_steps")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    path: str
    total_steps: int
    def __init__(self, path: _Optional[str] = ..., total_steps: _Optional[int] = ...) -> None: ...
