"""PushRequest on the wire without protobuf's copies, and the method table of WeightService.

The generated class parses the output of `encode_push`, and `decode_push` parses the output of the
generated class. `decode_push` leaves the chunk in gRPC's buffer and returns a view.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from paceline.errors import DataLoss
from paceline.v1 import weights_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceServicer

# tag = field number << 3 | wire type
_TARGET, _VERSION, _CHUNK_INDEX, _CRC32 = (
    0x08,
    0x10,
    0x18,
    0x20,
)
_CONTEXT, _OFFSET, _DATA = 0x2A, 0x30, 0x7A
_MAX_FIELDS = 64
"""Largest number of fields of one message, far above the real one: each unknown field costs a
microsecond of the event loop.
"""
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PushChunk:
    """One PushRequest; `data` is a view of the received message."""

    target: int
    version: int
    chunk_index: int
    crc32: int
    data: memoryview
    context: CommandContext | None = None
    offset: int = 0


def encode_push(chunk: PushChunk) -> bytes:
    """A PushRequest as protobuf bytes. The data is copied once."""
    head = bytearray()
    for tag, value in (
        (_TARGET, chunk.target),
        (_VERSION, chunk.version),
        (_CHUNK_INDEX, chunk.chunk_index),
        (_CRC32, chunk.crc32),
    ):
        if value:
            head.append(tag)
            _write_varint(head, value)

    if chunk.context is not None:
        context = chunk.context.SerializeToString()
        head.append(_CONTEXT)
        _write_varint(head, len(context))
        head += context
    if chunk.offset:
        head.append(_OFFSET)
        _write_varint(head, chunk.offset)

    head.append(_DATA)
    _write_varint(head, len(chunk.data))
    return b"".join((head, chunk.data))


def decode_push(message: bytes) -> PushChunk:
    """Fields of a PushRequest. Raises DataLoss for bytes that are no valid message.

    Unknown fields are skipped.
    """
    view = memoryview(message)
    numbers = {_TARGET: 0, _VERSION: 0, _CHUNK_INDEX: 0, _CRC32: 0, _OFFSET: 0}
    data, context = view[:0], None
    position = fields = 0
    try:
        while position < len(view):
            fields += 1
            if fields > _MAX_FIELDS:
                raise ValueError(f"more than {_MAX_FIELDS} fields")
            tag, position = _read_tag(view, position)
            if tag in numbers:
                numbers[tag], position = _read_varint(view, position)
            elif tag == _DATA:
                data, position = _read_bytes(view, position)
            elif tag == _CONTEXT:
                part, position = _read_bytes(view, position)
                context = context or CommandContext()
                context.MergeFromString(bytes(part))
            else:
                position = _skip(view, tag, position)
    except (IndexError, ValueError, DecodeError) as error:
        raise DataLoss(
            "a pushed chunk is not a valid PushRequest", seen=f"{error} at byte {position}"
        ) from error

    target = numbers[_TARGET] & _U32
    return PushChunk(
        target=target - (1 << 32) if target >> 31 else target,
        version=numbers[_VERSION],
        chunk_index=numbers[_CHUNK_INDEX] & _U32,
        crc32=numbers[_CRC32] & _U32,
        data=data,
        context=context,
        offset=numbers[_OFFSET] & _U32,
    )


def _write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _U64, position
    raise ValueError("varint of more than 10 bytes")


def _read_tag(view: memoryview, position: int) -> tuple[int, int]:
    """A field's tag: 32 bits in at most 5 bytes."""
    tag, end = _read_varint(view, position)
    if tag > _U32 or end - position > 5:
        raise ValueError("a tag of more than 32 bits")
    return tag, end


def _read_bytes(view: memoryview, position: int) -> tuple[memoryview, int]:
    length, position = _read_varint(view, position)
    end = position + length
    if end > len(view):
        raise ValueError(f"{length} bytes announced, {len(view) - position} left")
    return view[position:end], end


def _skip(view: memoryview, tag: int, position: int) -> int:
    """Position after an unknown field. Groups, unused since proto2, are refused."""
    match tag & 7:
        case _ if tag >> 3 == 0:
            raise ValueError("field number 0")
        case 0:
            return _read_varint(view, position)[1]
        case 2:
            return _read_bytes(view, position)[1]
        case 1 | 5 as wire_type:
            position += 8 if wire_type == 1 else 4
            if position > len(view):
                raise ValueError("message ends inside a field")
            return position
        case wire_type:
            raise ValueError(f"wire type {wire_type}")


SERVICE_NAME = "paceline.v1.WeightService"


def add_weight_service(servicer: WeightServiceServicer, server: grpc.aio.Server) -> None:
    """As the generated `add_WeightServiceServicer_to_server`, except that Push receives its chunks
    without protobuf's copies.
    """
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
        for name, request, response in (
            ("Prepare", pb.PrepareRequest, pb.PrepareResponse),
            ("Take", pb.TakeRequest, pb.TakeResponse),
            ("Commit", pb.CommitRequest, pb.CommitResponse),
            ("Abort", pb.AbortRequest, pb.AbortResponse),
            ("GetVersions", pb.GetVersionsRequest, pb.GetVersionsResponse),
        )
    }
    methods["Pull"] = grpc.unary_stream_rpc_method_handler(
        servicer.Pull,
        request_deserializer=pb.PullRequest.FromString,
        response_serializer=pb.PullResponse.SerializeToString,
    )
    methods["Push"] = grpc.stream_unary_rpc_method_handler(
        servicer.Push,
        request_deserializer=decode_push,
        response_serializer=pb.PushResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE_NAME, methods)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
