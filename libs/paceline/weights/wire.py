"""PushRequest on the wire without protobuf's copies, and the method table of WeightService.

The generated class parses the output of `encode_push`, and `decode_push` parses the output of the
generated class, which writes `data` last. `decode_push` leaves the chunk in gRPC's buffer and
returns a view.
"""

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from paceline.errors import DataLoss
from paceline.v1 import weights_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceServicer

_DATA = 0x7A
"""Tag of the field `data`: number 15, length-delimited."""
MOST_HEAD_BYTES = 4096
"""Bytes of the fields before `data`, far above the real number."""


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
    head = pb.PushRequest(
        target=chunk.target,  # type: ignore[arg-type]
        version=chunk.version,
        chunk_index=chunk.chunk_index,
        crc32=chunk.crc32,
        context=chunk.context,
        offset=chunk.offset,
    )
    tag, left = bytearray([_DATA]), len(chunk.data)
    while left > 0x7F:
        tag.append(left & 0x7F | 0x80)
        left >>= 7
    tag.append(left)
    return b"".join((head.SerializeToString(), tag, chunk.data))


def decode_push(message: bytes) -> PushChunk:
    """Fields of a PushRequest with data behind all other fields. Raises DataLoss for other bytes,
    also for fields of more than 15 or of a fixed size; other unknown fields are ignored.
    """
    view = memoryview(message)
    try:
        end = _end_of_head(view)
        nbytes, start = _read_varint(view, end + 1)
        if start + nbytes != len(view):
            raise ValueError(f"{nbytes} bytes announced, {len(view) - start} left")
        head = pb.PushRequest.FromString(message[:end])
    except (IndexError, ValueError, DecodeError) as error:
        raise DataLoss("a pushed chunk is not a valid PushRequest", seen=error) from error
    return PushChunk(
        target=head.target,
        version=head.version,
        chunk_index=head.chunk_index,
        crc32=head.crc32,
        data=view[start:],
        context=head.context if head.HasField("context") else None,
        offset=head.offset,
    )


def _end_of_head(view: memoryview) -> int:
    """Position of the tag of `data`. Tags of fields below 16 take one byte."""
    position = 0
    while (tag := view[position]) != _DATA:
        if tag & 7 not in (0, 2) or tag > 0x7F or position > MOST_HEAD_BYTES:
            raise ValueError(f"tag {tag} at byte {position}")
        value, position = _read_varint(view, position + 1)
        position += value if tag & 7 == 2 else 0
    return position


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("varint of more than 10 bytes")


SERVICE_NAME = "paceline.v1.WeightService"


_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
}


def add_weight_service(servicer: WeightServiceServicer, server: grpc.aio.Server) -> None:
    """As the generated `add_WeightServiceServicer_to_server`, except that Push receives its chunks
    without protobuf's copies.
    """
    methods = {
        one.name: _HANDLERS[one.client_streaming, one.server_streaming](
            getattr(servicer, one.name),
            decode_push if one.name == "Push" else GetMessageClass(one.input_type).FromString,
            GetMessageClass(one.output_type).SerializeToString,
        )
        for one in pb.DESCRIPTOR.services_by_name["WeightService"].methods
    }
    server.add_registered_method_handlers(SERVICE_NAME, methods)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
