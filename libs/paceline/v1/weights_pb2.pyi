from paceline.v1 import engine_pb2 as _engine_pb2
from paceline.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_ENCODING_UNSPECIFIED: _ClassVar[WeightEncoding]
    WEIGHT_ENCODING_FULL: _ClassVar[WeightEncoding]
    WEIGHT_ENCODING_SPARSE_DELTA: _ClassVar[WeightEncoding]
WEIGHT_ENCODING_UNSPECIFIED: WeightEncoding
WEIGHT_ENCODING_FULL: WeightEncoding
WEIGHT_ENCODING_SPARSE_DELTA: WeightEncoding

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    nbytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class SparseDelta(_message.Message):
    __slots__ = ("nbytes", "stream_hash", "base_hash")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STREAM_HASH_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    stream_hash: str
    base_hash: str
    def __init__(self, nbytes: _Optional[int] = ..., stream_hash: _Optional[str] = ..., base_hash: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("target", "version", "tensors", "total_bytes", "chunk_bytes", "encoding", "base_version", "lm_head_hash", "metadata", "content_hash", "delta")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LM_HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    target: _engine_pb2.WeightTarget
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    total_bytes: int
    chunk_bytes: int
    encoding: WeightEncoding
    base_version: int
    lm_head_hash: str
    metadata: _containers.ScalarMap[str, str]
    content_hash: str
    delta: SparseDelta
    def __init__(self, target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ..., version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., encoding: _Optional[_Union[WeightEncoding, str]] = ..., base_version: _Optional[int] = ..., lm_head_hash: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., content_hash: _Optional[str] = ..., delta: _Optional[_Union[SparseDelta, _Mapping]] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("context", "manifest")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    manifest: Manifest
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("complete", "wanted_chunks", "replaced")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    WANTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    wanted_chunks: _containers.RepeatedScalarFieldContainer[int]
    replaced: bool
    def __init__(self, complete: _Optional[bool] = ..., wanted_chunks: _Optional[_Iterable[int]] = ..., replaced: _Optional[bool] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("target", "version", "chunk_index", "crc32", "context", "offset", "data")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    target: _engine_pb2.WeightTarget
    version: int
    chunk_index: int
    crc32: int
    context: _trajectory_pb2.CommandContext
    offset: int
    data: bytes
    def __init__(self, target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ..., version: _Optional[int] = ..., chunk_index: _Optional[int] = ..., crc32: _Optional[int] = ..., context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("bytes_received", "receive_s", "spool_s", "fan_out_s", "apply_s", "missing_chunks")
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    SPOOL_S_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_S_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    bytes_received: int
    receive_s: float
    spool_s: float
    fan_out_s: float
    apply_s: float
    missing_chunks: int
    def __init__(self, bytes_received: _Optional[int] = ..., receive_s: _Optional[float] = ..., spool_s: _Optional[float] = ..., fan_out_s: _Optional[float] = ..., apply_s: _Optional[float] = ..., missing_chunks: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("context", "versions", "mode", "leased_workers", "judge")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEASED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    versions: _trajectory_pb2.VersionSet
    mode: _engine_pb2.PauseMode
    leased_workers: _containers.RepeatedScalarFieldContainer[int]
    judge: bool
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., mode: _Optional[_Union[_engine_pb2.PauseMode, str]] = ..., leased_workers: _Optional[_Iterable[int]] = ..., judge: _Optional[bool] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _trajectory_pb2.VersionSet
    def __init__(self, versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("context", "target", "version")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    context: _trajectory_pb2.CommandContext
    target: _engine_pb2.WeightTarget
    version: int
    def __init__(self, context: _Optional[_Union[_trajectory_pb2.CommandContext, _Mapping]] = ..., target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ..., version: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionsResponse(_message.Message):
    __slots__ = ("versions", "previous", "prepared_policy", "prepared_drafter", "damaged")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_POLICY_FIELD_NUMBER: _ClassVar[int]
    PREPARED_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    versions: _trajectory_pb2.VersionSet
    previous: _trajectory_pb2.VersionSet
    prepared_policy: _containers.RepeatedScalarFieldContainer[int]
    prepared_drafter: _containers.RepeatedScalarFieldContainer[int]
    damaged: _containers.RepeatedScalarFieldContainer[_engine_pb2.WeightTarget]
    def __init__(self, versions: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., previous: _Optional[_Union[_trajectory_pb2.VersionSet, _Mapping]] = ..., prepared_policy: _Optional[_Iterable[int]] = ..., prepared_drafter: _Optional[_Iterable[int]] = ..., damaged: _Optional[_Iterable[_Union[_engine_pb2.WeightTarget, str]]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: _engine_pb2.WeightTarget
    def __init__(self, target: _Optional[_Union[_engine_pb2.WeightTarget, str]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("manifest", "chunk")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    chunk: PushRequest
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[PushRequest, _Mapping]] = ...) -> None: ...
