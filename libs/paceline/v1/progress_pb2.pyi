from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetProgressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetProgressResponse(_message.Message):
    __slots__ = ("parts", "alarm")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    alarm: str
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., alarm: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("name", "doing", "doing_s", "still_s", "waits_for", "counts", "last_span", "last_span_s", "trouble")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    DOING_S_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LAST_SPAN_FIELD_NUMBER: _ClassVar[int]
    LAST_SPAN_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    doing: str
    doing_s: float
    still_s: float
    waits_for: str
    counts: _containers.ScalarMap[str, int]
    last_span: str
    last_span_s: float
    trouble: str
    def __init__(self, name: _Optional[str] = ..., doing: _Optional[str] = ..., doing_s: _Optional[float] = ..., still_s: _Optional[float] = ..., waits_for: _Optional[str] = ..., counts: _Optional[_Mapping[str, int]] = ..., last_span: _Optional[str] = ..., last_span_s: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...
