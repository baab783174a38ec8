from paceline.v1 import engine_pb2 as _engine_pb2
from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadVersionRequest(_message.Message):
    __slots__ = ("target", "version", "path")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    target: _engine_pb2.WeightTarget
    version: int
    path: str
    def __init__(self, target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ..., version: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class LoadVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServeSetRequest(_message.Message):
    __slots__ = ("versions", "mode", "leased_workers", "judge")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEASED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    versions: _trajectory_pb2.VersionSet
    mode: _engine_pb2.PauseMode
    leased_workers: _containers.RepeatedScalarFieldContainer[int]
    judge: bool
    def __init__(self, versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., mode: _Optional[_Union[_engine_pb2.PauseMode, str]] = ..., leased_workers: _Optional[_Iterable[int]] = ..., judge: _Optional[bool] = ...) -> None: ...

class ServeSetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetVersionRequest(_message.Message):
    __slots__ = ("target", "version")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    target: _engine_pb2.WeightTarget
    version: int
    def __init__(self, target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ..., version: _Optional[int] = ...) -> None: ...

class ForgetVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchGroupsResponse(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: int
    def __init__(self, closed: _Optional[int] = ...) -> None: ...

class TakeGroupsRequest(_message.Message):
    __slots__ = ("context", "most", "last")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    most: int
    last: bool
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., most: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class TakeGroupsResponse(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: int
    def __init__(self, taken: _Optional[int] = ...) -> None: ...
