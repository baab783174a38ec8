"""Every decoder of bytes from outside a process: its name, valid bytes, and its reader."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from whole_versions import build_manifest

from paceline import events
from paceline.client.calls import reader
from paceline.client.session import Opened, SessionInfo, Task
from paceline.errors import PacelineError
from paceline.messages import versions_from_proto
from paceline.models.config import read_config
from paceline.ranks.messages import Failed, Saved
from paceline.report.spans import read_spans
from paceline.services.coordinator.journal.entry import VERSION as JOURNAL_VERSION
from paceline.services.coordinator.journal.entry import JournalEntry
from paceline.services.coordinator.journal.groups import KnownGroup
from paceline.services.coordinator.journal.journal import Snapshot, pack_snapshot, unpack_snapshot
from paceline.services.coordinator.journal.records import Carried
from paceline.services.coordinator.machine.state import State
from paceline.services.policy_trainer.messages import MESSAGES
from paceline.services.rollout_gateway.api.http.anthropic import (
    ConversationBody,
    MessagesBody,
)
from paceline.services.rollout_gateway.api.http.openai_schema import ChatBody, CompletionBody
from paceline.services.rollout_gateway.api.http.requests import Outline, judged
from paceline.services.rollout_gateway.api.http.responses_schema import ResponsesBody
from paceline.services.rollout_gateway.api.http.sessions import FailBody, OpenBody, RewardBody
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.tool_formats.families import tool_format
from paceline.services.rollout_gateway.engines.requests.structures import (
    Structure,
    parse_schema,
    structure_of,
)
from paceline.services.rollout_gateway.engines.sampling import check_sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.rewards.code_harness import Wire, unpack
from paceline.services.rollout_gateway.rewards.remote import reward_of
from paceline.services.rollout_gateway.sandbox import checked_files
from paceline.streams.entries import (
    FeatureBatch,
    decode_features,
    decode_trajectory,
    encode_features,
    encode_trajectory,
)
from paceline.tasks.file import read_tasks
from paceline.tensors import NamedTensor, decode_safetensors, encode_safetensors, from_numpy
from paceline.trajectory import BranchKey, SpeculationStats, Trajectory, VersionSpan
from paceline.v1 import coordinator_pb2 as cpb
from paceline.v1 import engine_pb2 as epb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1 import weights_pb2 as wpb
from paceline.weights.delta import apply_delta, encode_delta
from paceline.weights.manifest import check_manifest, layouts
from paceline.whole_files import read_hashes


class Decoder(NamedTuple):
    """One decoder; `read` returns or raises an error of `refuses`, and no other error."""

    valid: tuple[bytes, ...]
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...] = (PacelineError,)


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def as_json(raw: bytes) -> Any:
    """Values that pass a JSON parser before the decoder; {} for anything else."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return {}


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader for a directory with one file."""

    def reads(raw: bytes) -> object:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / name).write_bytes(raw)
            return read(Path(directory))

    return reads


def message(kind: Any, read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A reader of messages that protobuf has parsed."""

    def reads(raw: bytes) -> object:
        try:
            found = kind.FromString(raw)
        except DecodeError:
            return None
        return read(found)

    return reads


def body(kind: Any) -> Callable[[bytes], object]:
    def reads(raw: bytes) -> object:
        Outline(100).add(raw)
        found, _ = judged(kind, raw)
        if hasattr(found, "json_schema"):
            found.sampling(10)
        return found.request() if hasattr(found, "request") and kind is not ResponsesBody else found

    return reads


def responses_body(raw: bytes) -> object:
    found, _ = judged(ResponsesBody, raw)
    found.check()
    return found.request(())


def entry(raw: bytes, decode: Callable[[dict[str, str], bytes], object]) -> object:
    """An entry of a stream: a line of JSON for the header, and the payload."""
    header, _, payload = raw.partition(b"\n")
    fields = as_json(header)
    texts = fields if isinstance(fields, dict) else {}
    return decode({name: value for name, value in texts.items() if isinstance(value, str)}, payload)


def entry_bytes(header: dict[str, str], payload: bytes) -> bytes:
    return json.dumps(header).encode() + b"\n" + payload


def through_pipe(raw: bytes) -> object:
    """Unpacks bytes that a reward's child process wrote."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(raw[:60_000])
    own = Wire(reader, os.open(os.devnull, os.O_WRONLY))
    try:
        return unpack(own.receive(), lambda number: number)
    finally:
        own._reader.close()
        own._writer.close()


def weight_delta(raw: bytes) -> object:
    content = memoryview(bytearray(OLDER.view))
    return list(apply_delta(raw, [NamedTensor("w", OLDER.dtype, OLDER.shape, content)]))


def manifest(found: wpb.Manifest) -> object:
    check_manifest(found)
    return layouts(found)


def parsed_chat(name: Any) -> Callable[[bytes], object]:
    def reads(raw: bytes) -> object:
        parser = ChatParser(tool_format(name, ""), reasoning=True)
        said = raw.decode("utf-8", "replace")
        size = max(7, len(said) // 1000)
        for start in range(0, len(said), size):
            parser.push(said[start : start + size])
        parser.finish()
        return parser.message

    return reads


def client_answers(raw: bytes) -> object:
    for kind in (Task, SessionInfo, Opened):
        with suppress(PacelineError):
            reader(kind)(raw.decode("utf-8", "replace"))
    return None


def sampling(found: tpb.SamplingParams) -> object:
    asked = wire.sampling_from(found)
    check_sampling(asked, 320)
    return structure_of(asked)


def worker_event(found: epb.WorkerEvent) -> object:
    if found.WhichOneof("event") == "failed":
        return wire.error_from(found.failed)
    return wire.rows_from(found.ready), versions_from_proto(found.ready.versions)


def files_of_a_sandbox(found: Any) -> object:
    files = found.get("files") if isinstance(found, dict) else None
    return checked_files(files) if isinstance(files, dict) else None


SAID = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2.5]}'}}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
SAMPLED = {
    "n": 2,
    "max_tokens": 4,
    "seed": 1,
    "stop": ["a"],
    "logit_bias": {"5": 1.5},
    "top_p": 0.5,
}
CHAT = {
    **SAMPLED,
    "messages": [SAID, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "2", "is_error": True}
ANTHROPIC = {
    "messages": [
        SAID,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [RESULT]},
    ],
    "system": "s",
    "tools": [{"name": "f", "input_schema": {}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "max_tokens": 4,
}
ITEMS = [SAID, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]
ITEMS += [{"type": "function_call_output", "call_id": "a", "output": "2"}]
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": ({**SAMPLED, "prompt": "Hi"}, {"prompt": [[1, 2], [3]]}, {"prompt": ["a"]}),
    "/v1/chat/completions": (CHAT,),
    "/v1/messages": (ANTHROPIC,),
    "/v1/messages/count_tokens": (
        {name: value for name, value in ANTHROPIC.items() if name != "max_tokens"},
    ),
    "/v1/responses": (
        {"input": ITEMS, "tools": [{"type": "function", **TOOL}], "metadata": {"a": "b"}},
    ),
    "/v1/sessions": ({"task_id": "a", "group_size": 2, "turn_discount": 0.5, "timeout_s": 5},),
    "/v1/rewards": ({"completion_id": "a", "value": 0.5},),
    "/v1/sessions/current/reward": ({"value": 0.5, "accumulate": True, "idempotency_key": "k"},),
    "/v1/sessions/current/complete": ({"reward": 0.5},),
    "/v1/sessions/current/fail": ({"reason": "infra", "message": "m"},),
}
"""Valid bodies of the HTTP paths that take one."""


def lines(*values: object) -> bytes:
    return b"\n".join(json.dumps(value).encode() for value in values)


def bodies(path: str) -> tuple[bytes, ...]:
    return tuple(lines(one) for one in BODIES[path])


TENSOR = from_numpy("model.norm.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "eos_token_id": [1, 2],
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
SPAN = {
    **dict.fromkeys(("trace_id", "span_id", "parent_id", "name", "kind", "service"), "a"),
    "start_ns": 1,
    "end_ns": 2,
    "links": [],
    "attributes": {"a": 1},
}
ANSWER = {
    "id": "c",
    "api_key": "k",
    "group_id": "g",
    "state": "open",
    "task": {"id": "t", "prompt": "1", "metadata": {"a": "b"}},
}
JOURNAL = {
    "v": JOURNAL_VERSION,
    "at_s": 1.0,
    "event": "StepBegan",
    "data": {"step": 1, "traceparent": ""},
    "step": 1,
    "phase": "rollout",
    "slots": [[0, 1, "engine", 1]],
    "record": {"step": 1, "reward_mean": 0.5},
}
TASK = {"task_id": "a", "prompt": "1+1=", "answer": "2", "metadata": {"a": "b"}}
TRAJECTORY = Trajectory(
    key=BranchKey("r", "s", "b"),
    step=1,
    task_id="t",
    group_id="g",
    group_size=2,
    task_index=0,
    sample_index=1,
    token_ids=(1, 2, 3),
    loss_mask=(0, 1, 1),
    behavior_logprobs=(0.0, -0.5, -1.0),
    version_spans=(VersionSpan(1, 3, 4),),
    reward=1.0,
    seed=7,
    temperature=1.0,
    finish_reason="stop",
    speculation=SpeculationStats(),
    branch_count=1,
)
FEATURES = FeatureBatch(
    run_id="r",
    step=1,
    session_id="s",
    policy_version=1,
    lm_head_hash="h",
    hidden=NamedTensor("hidden", "F32", (2, 3), bytes(24)),
    token_ids=np.arange(3, dtype=np.int32),
    positions=np.arange(2, dtype=np.int32),
    mask=np.ones(2, dtype=np.uint8),
    versions=np.ones(2, dtype=np.int64),
    layers="1,3",
    convention="post_norm",
)
REQUEST = epb.EngineRequest(
    request_id=1,
    prompt_token_ids=[1, 2],
    sampling=tpb.SamplingParams(temperature=1.0, max_tokens=4, stop=["a"], json_schema="{}"),
)
FACT = cpb.Fact(sequence=1, step_began=cpb.StepBegan(samples=2))
SNAPSHOT = Snapshot(
    *(9, 1.0, {"0": "00-a-b-01"}, State(), Carried(pulls={"off": 3})),
    *({"0": (KnownGroup(0, "s0.t0", 2),)}, (0, 1.5)),
)
MANIFEST = build_manifest(epb.WEIGHT_TARGET_POLICY, 1, [TENSOR])
OLDER = NamedTensor(TENSOR.name, TENSOR.dtype, TENSOR.shape, bytes(len(TENSOR.view)))
DELTA = encode_delta([OLDER], [TENSOR], limit=1 << 20)
assert DELTA is not None
assert DELTA.changed

DECODERS: dict[str, Decoder] = {
    "safetensors": Decoder((bytes(encode_safetensors([TENSOR])),), decode_safetensors),
    "weight deltas": Decoder((DELTA.stream,), weight_delta),
    "weight manifests": Decoder((MANIFEST.SerializeToString(),), message(wpb.Manifest, manifest)),
    "trajectories": Decoder(
        (entry_bytes(*encode_trajectory(TRAJECTORY)),), lambda raw: entry(raw, decode_trajectory)
    ),
    "features": Decoder(
        (entry_bytes(*encode_features(FEATURES)),), lambda raw: entry(raw, decode_features)
    ),
    "tagged JSON": Decoder(
        (MESSAGES.encode(Saved(1, "p", 2)), MESSAGES.encode(Failed(1, "DataLoss", "m", "R"))),
        MESSAGES.decode,
    ),
    "journal entries": Decoder((lines(JOURNAL),), lambda raw: JournalEntry.from_json(as_json(raw))),
    "journal snapshots": Decoder((pack_snapshot(SNAPSHOT),), unpack_snapshot),
    "engine requests": Decoder(
        (REQUEST.SerializeToString(),),
        message(
            epb.EngineRequest, lambda found: sampling(wire.request_from(found) and found.sampling)
        ),
    ),
    "worker events": Decoder(
        (
            epb.WorkerEvent(ready=epb.WorkerReady(row_width=8, row_layers="1")).SerializeToString(),
            epb.WorkerEvent(failed=epb.CommandFailed(reason="R", family="R")).SerializeToString(),
        ),
        message(epb.WorkerEvent, worker_event),
    ),
    "answers of the client": Decoder((lines(ANSWER),), client_answers),
    "task files": Decoder(
        (lines(TASK, {**TASK, "task_id": "b"}),),
        in_file("tasks.jsonl", lambda directory: read_tasks(directory / "tasks.jsonl")),
    ),
    "checkpoint configs": Decoder((lines(CONFIG),), in_file("config.json", read_config)),
    "checkpoint hashes": Decoder(
        (lines({"sha256": {"a": "0" * 64}}),), in_file("manifest.json", read_hashes)
    ),
    "hermes calls": Decoder(
        (b'<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": [1]}}</tool_call>',),
        parsed_chat("hermes"),
    ),
    "llama calls": Decoder(
        (b'{"name": "f", "parameters": {"x": 1}}; ',), parsed_chat("llama3_json")
    ),
    "mistral calls": Decoder(
        (b'[TOOL_CALLS][{"name": "f", "arguments": {}}]', b"[TOOL_CALLS]f[ARGS]{}"),
        parsed_chat("mistral"),
    ),
    "Qwen3-Coder calls": Decoder(
        (b"<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",),
        parsed_chat("qwen3_coder"),
    ),
    "GLM calls": Decoder(
        (b"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",),
        parsed_chat("glm45"),
    ),
    "DeepSeek calls": Decoder(
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>".encode(),
        ),
        parsed_chat("deepseek_v3"),
    ),
    "Kimi calls": Decoder(
        (
            b"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            b"<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        parsed_chat("kimi_k2"),
    ),
    "channels": Decoder(
        (
            b"<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary "
            b"to=functions.f <|constrain|>json<|message|>{}<|call|>",
        ),
        parsed_chat("harmony"),
    ),
    "JSON schemas": Decoder(
        (lines(TOOL["parameters"]),), lambda raw: parse_schema(Structure("json_schema", text(raw)))
    ),
    "sandbox requests": Decoder(
        (lines({"files": {"a/b": "x", "c": ""}}),), lambda raw: files_of_a_sandbox(as_json(raw))
    ),
    "pipes of rewards": Decoder(
        (
            lines({"dict": [[{"tuple": [1, "a"]}, {"bytes": "00ff"}]]}) + b"\n",
            lines({"complex": [1, 2]}) + b"\n",
        ),
        through_pipe,
        (ValueError, EOFError),
    ),
    "rewards at a URL": Decoder((b'{"reward": 0.5}',), reward_of),
    "span files": Decoder(
        (lines(SPAN, SPAN),), in_file("a.jsonl", lambda at: list(read_spans(at)))
    ),
    "facts": Decoder(
        (cpb.Facts(facts=[FACT]).SerializeToString(),),
        lambda raw: events._decode([b"r\0", raw, raw]),
    ),
    **{
        f"bodies of {path}": Decoder(bodies(path), body(kind))
        for path, kind in {
            "/v1/completions": CompletionBody,
            "/v1/chat/completions": ChatBody,
            "/v1/messages": MessagesBody,
            "/v1/messages/count_tokens": ConversationBody,
            "/v1/sessions": OpenBody,
            "/v1/sessions/current/reward": RewardBody,
            "/v1/sessions/current/fail": FailBody,
        }.items()
    },
    "bodies of /v1/responses": Decoder(bodies("/v1/responses"), responses_body),
}
