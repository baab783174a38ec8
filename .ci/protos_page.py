"""Writes docs/protos.md: services, messages and enums of proto/, with the comments in the files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cells import escaped
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ".paceline.v1."
Place = tuple[int, ...]
"""Numbers of fields and indices from the file's descriptor down to what a comment stands at."""
Comments = dict[Place, str]


def protos_page() -> str:
    """All files, each as its services, its messages and its enums."""
    lines = [
        "# Wire contracts",
        "",
        "Written by `make docs` from `proto/paceline/v1/*.proto`. `stream` marks a sequence of",
        "messages. An unset field has the default of its type. An `optional` field distinguishes",
        "an unset value from the default.",
    ]
    for file in parsed_files():
        lines += file_lines(file)
    return "\n".join(lines) + "\n"


def parsed_files() -> Sequence[FileDescriptorProto]:
    """What protoc reads, comments included, by name."""
    names = sorted(str(path.relative_to(ROOT / "proto")) for path in ROOT.glob("proto/**/*.proto"))
    with TemporaryDirectory() as directory:
        out = Path(directory) / "protos"
        options = [f"-I{ROOT / 'proto'}", f"--descriptor_set_out={out}", "--include_source_info"]
        if protoc.main(["protoc", *options, *names]):
            sys.exit("docs: protoc refuses proto/")
        return FileDescriptorSet.FromString(out.read_bytes()).file


def file_lines(file: FileDescriptorProto) -> Iterator[str]:
    """One file; its comment is the one at its first line."""
    comments = {
        tuple(one.path): " ".join((one.leading_comments or one.trailing_comments).split())
        for one in file.source_code_info.location
    }
    syntax = (FileDescriptorProto.SYNTAX_FIELD_NUMBER,)
    yield from ("", f"## {file.name.rpartition('/')[2]}", *paragraph(comments, syntax))
    for index, service in enumerate(file.service):
        place = (FileDescriptorProto.SERVICE_FIELD_NUMBER, index)
        yield from service_lines(service, place, comments)
    for index, message in enumerate(file.message_type):
        place = (FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, index)
        yield from message_lines(message, message.name, place, comments)
    for index, enum in enumerate(file.enum_type):
        place = (FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, index)
        yield from enum_lines(enum, enum.name, place, comments)


def paragraph(comments: Comments, place: Place) -> Iterator[str]:
    """The comment at a place, if there is one."""
    if comments.get(place):
        yield from ("", escaped(comments[place]))


def service_lines(
    service: ServiceDescriptorProto, place: Place, comments: Comments
) -> Iterator[str]:
    """A service as a table of its calls."""
    yield from ("", f"### service {service.name}", *paragraph(comments, place))
    yield from ("", "| call | takes | answers | meaning |", "|---|---|---|---|")
    number = ServiceDescriptorProto.METHOD_FIELD_NUMBER
    for index, call in enumerate(service.method):
        takes = streamed(call.input_type, is_stream=call.client_streaming)
        answers = streamed(call.output_type, is_stream=call.server_streaming)
        meaning = escaped(comments.get((*place, number, index), ""))
        yield f"| `{call.name}` | {takes} | {answers} | {meaning} |"


def streamed(full_name: str, *, is_stream: bool) -> str:
    """The message that a call takes or answers."""
    return f"{'stream ' if is_stream else ''}`{short(full_name)}`"


def message_lines(
    message: DescriptorProto, name: str, place: Place, comments: Comments
) -> Iterator[str]:
    """A message as a table of its fields, then what is declared in it."""
    yield from ("", f"### {name}", *paragraph(comments, place))
    if message.field:
        yield from ("", "| field | number | type | meaning |", "|---|---|---|---|")
    for index, field in enumerate(message.field):
        meaning = escaped(comments.get((*place, DescriptorProto.FIELD_FIELD_NUMBER, index), ""))
        choice = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            choice = f", one of `{message.oneof_decl[field.oneof_index].name}`"
        kind = f"{field_type(field, message)}{choice}"
        yield f"| `{field.name}` | {field.number} | {kind} | {meaning} |"
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            below = (*place, DescriptorProto.NESTED_TYPE_FIELD_NUMBER, index)
            yield from message_lines(nested, f"{name}.{nested.name}", below, comments)
    for index, enum in enumerate(message.enum_type):
        below = (*place, DescriptorProto.ENUM_TYPE_FIELD_NUMBER, index)
        yield from enum_lines(enum, f"{name}.{enum.name}", below, comments)


def field_type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """`string`, `repeated uint64`, `map<string, Arm>` and the like."""
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = (field_type(part, nested).strip("`") for part in nested.field)
            return f"`map<{key}, {value}>`"
    kind = short(field.type_name) or FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"`repeated {kind}`"
    return f"`optional {kind}`" if field.proto3_optional else f"`{kind}`"


def short(full_name: str) -> str:
    """A type's name without the package that all of them share."""
    return full_name.removeprefix(PACKAGE).removeprefix(".")


def enum_lines(
    enum: EnumDescriptorProto, name: str, place: Place, comments: Comments
) -> Iterator[str]:
    """An enum as a table of its values."""
    yield from ("", f"### enum {name}", *paragraph(comments, place))
    yield from ("", "| value | number | meaning |", "|---|---|---|")
    for index, value in enumerate(enum.value):
        at = (*place, EnumDescriptorProto.VALUE_FIELD_NUMBER, index)
        yield f"| `{value.name}` | {value.number} | {escaped(comments.get(at, ''))} |"
