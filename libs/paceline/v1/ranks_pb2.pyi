from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldRanksRequest(_message.Message):
    __slots__ = ("joined", "started", "said", "lost", "ended")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    joined: HostJoined
    started: RanksStarted
    said: RankSaid
    lost: str
    ended: RanksEnded
    def __init__(self, joined: _Optional[_Union[HostJoined, _Mapping]] = ..., started: _Optional[_Union[RanksStarted, _Mapping]] = ..., said: _Optional[_Union[RankSaid, _Mapping]] = ..., lost: _Optional[str] = ..., ended: _Optional[_Union[RanksEnded, _Mapping]] = ...) -> None: ...

class HostJoined(_message.Message):
    __slots__ = ("host", "same")
    class SameEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    host: int
    same: _containers.ScalarMap[str, str]
    def __init__(self, host: _Optional[int] = ..., same: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RanksStarted(_message.Message):
    __slots__ = ("pids",)
    PIDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pids: _Optional[_Iterable[int]] = ...) -> None: ...

class RankSaid(_message.Message):
    __slots__ = ("rank", "message")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    message: bytes
    def __init__(self, rank: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class RanksEnded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldRanksResponse(_message.Message):
    __slots__ = ("start", "message", "kill", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: StartRanks
    message: bytes
    kill: KillRanks
    end: EndRanks
    def __init__(self, start: _Optional[_Union[StartRanks, _Mapping]] = ..., message: _Optional[bytes] = ..., kill: _Optional[_Union[KillRanks, _Mapping]] = ..., end: _Optional[_Union[EndRanks, _Mapping]] = ...) -> None: ...

class StartRanks(_message.Message):
    __slots__ = ("store", "deadline_s", "share")
    STORE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    store: str
    deadline_s: float
    share: RankShare
    def __init__(self, store: _Optional[str] = ..., deadline_s: _Optional[float] = ..., share: _Optional[_Union[RankShare, _Mapping]] = ...) -> None: ...

class RankShare(_message.Message):
    __slots__ = ("first", "ranks", "world_size", "device")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    first: int
    ranks: int
    world_size: int
    device: str
    def __init__(self, first: _Optional[int] = ..., ranks: _Optional[int] = ..., world_size: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class KillRanks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndRanks(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...
