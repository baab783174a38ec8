from paceline.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindReplicaRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: int
    def __init__(self, replica: _Optional[int] = ...) -> None: ...

class FindReplicaResponse(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class HoldWorkersRequest(_message.Message):
    __slots__ = ("joined", "started", "rows", "event", "ended")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    joined: WorkerHostJoined
    started: WorkerStarted
    rows: WorkerPart
    event: WorkerPart
    ended: WorkerEnded
    def __init__(self, joined: _Optional[_Union[WorkerHostJoined, _Mapping]] = ..., started: _Optional[_Union[WorkerStarted, _Mapping]] = ..., rows: _Optional[_Union[WorkerPart, _Mapping]] = ..., event: _Optional[_Union[WorkerPart, _Mapping]] = ..., ended: _Optional[_Union[WorkerEnded, _Mapping]] = ...) -> None: ...

class WorkerHostJoined(_message.Message):
    __slots__ = ("host", "same", "copies_address")
    class SameEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    COPIES_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    host: int
    same: _containers.ScalarMap[str, str]
    copies_address: str
    def __init__(self, host: _Optional[int] = ..., same: _Optional[_Mapping[str, str]] = ..., copies_address: _Optional[str] = ...) -> None: ...

class WorkerStarted(_message.Message):
    __slots__ = ("life", "pid")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    life: int
    pid: int
    def __init__(self, life: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class WorkerPart(_message.Message):
    __slots__ = ("life", "data", "more")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    life: int
    data: bytes
    more: bool
    def __init__(self, life: _Optional[int] = ..., data: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class WorkerEnded(_message.Message):
    __slots__ = ("life", "reason")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    life: int
    reason: str
    def __init__(self, life: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class HoldWorkersResponse(_message.Message):
    __slots__ = ("start", "command", "kill", "expect_end")
    START_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    EXPECT_END_FIELD_NUMBER: _ClassVar[int]
    start: StartWorker
    command: WorkerPart
    kill: KillWorker
    expect_end: ExpectWorkerEnd
    def __init__(self, start: _Optional[_Union[StartWorker, _Mapping]] = ..., command: _Optional[_Union[WorkerPart, _Mapping]] = ..., kill: _Optional[_Union[KillWorker, _Mapping]] = ..., expect_end: _Optional[_Union[ExpectWorkerEnd, _Mapping]] = ...) -> None: ...

class StartWorker(_message.Message):
    __slots__ = ("life", "worker_index", "deadline_s")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    life: int
    worker_index: int
    deadline_s: float
    def __init__(self, life: _Optional[int] = ..., worker_index: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class KillWorker(_message.Message):
    __slots__ = ("life",)
    LIFE_FIELD_NUMBER: _ClassVar[int]
    life: int
    def __init__(self, life: _Optional[int] = ...) -> None: ...

class ExpectWorkerEnd(_message.Message):
    __slots__ = ("life",)
    LIFE_FIELD_NUMBER: _ClassVar[int]
    life: int
    def __init__(self, life: _Optional[int] = ...) -> None: ...

class ReadSpooledRequest(_message.Message):
    __slots__ = ("target", "version", "name", "start", "host", "manifest")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    target: _engine_pb2.WeightTarget
    version: int
    name: str
    start: int
    host: int
    manifest: str
    def __init__(self, target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ..., version: _Optional[int] = ..., name: _Optional[str] = ..., start: _Optional[int] = ..., host: _Optional[int] = ..., manifest: _Optional[str] = ...) -> None: ...

class ReadSpooledResponse(_message.Message):
    __slots__ = ("data", "files", "source")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    files: _containers.ScalarMap[str, int]
    source: str
    def __init__(self, data: _Optional[bytes] = ..., files: _Optional[_Mapping[str, int]] = ..., source: _Optional[str] = ...) -> None: ...
