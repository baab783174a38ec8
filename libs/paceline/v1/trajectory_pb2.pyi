from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVAL: _ClassVar[Purpose]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVAL: Purpose
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class CommandContext(_message.Message):
    __slots__ = ("run_id", "step", "epoch", "lease_proof")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_PROOF_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    epoch: int
    lease_proof: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_proof: _Optional[str] = ...) -> None: ...

class VersionSet(_message.Message):
    __slots__ = ("seq", "policy", "drafter", "profile")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    policy: int
    drafter: int
    profile: str
    def __init__(self, seq: _Optional[int] = ..., policy: _Optional[int] = ..., drafter: _Optional[int] = ..., profile: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "end", "policy_version")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    policy_version: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class DrawSpan(_message.Message):
    __slots__ = ("start", "end", "arm", "number_format", "reused", "stale")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    arm: str
    number_format: str
    reused: bool
    stale: bool
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., arm: _Optional[str] = ..., number_format: _Optional[str] = ..., reused: _Optional[bool] = ..., stale: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "seed", "ignore_eos", "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "json_schema", "min_tokens", "allowed_token_ids", "prompt_logprobs", "include_stop_str_in_output", "regex", "choice", "grammar", "tool_grammar", "free_until")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TOOL_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FREE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    ignore_eos: bool
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    json_schema: str
    min_tokens: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    include_stop_str_in_output: bool
    regex: str
    choice: _containers.RepeatedScalarFieldContainer[str]
    grammar: str
    tool_grammar: str
    free_until: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., json_schema: _Optional[str] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Iterable[str]] = ..., grammar: _Optional[str] = ..., tool_grammar: _Optional[str] = ..., free_until: _Optional[str] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("target_steps", "drafted_tokens", "accepted_tokens", "drafted_round_tokens", "drafted_rounds", "proposed_at", "accepted_at", "trained_rounds", "trained_round_tokens", "arm_drafted_rounds", "arm_round_tokens")
    class ArmDraftedRoundsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ArmRoundTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TARGET_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_ROUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_AT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ROUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARM_DRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ARM_ROUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    target_steps: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_round_tokens: int
    drafted_rounds: int
    proposed_at: _containers.RepeatedScalarFieldContainer[int]
    accepted_at: _containers.RepeatedScalarFieldContainer[int]
    trained_rounds: int
    trained_round_tokens: int
    arm_drafted_rounds: _containers.ScalarMap[str, int]
    arm_round_tokens: _containers.ScalarMap[str, int]
    def __init__(self, target_steps: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., drafted_round_tokens: _Optional[int] = ..., drafted_rounds: _Optional[int] = ..., proposed_at: _Optional[_Iterable[int]] = ..., accepted_at: _Optional[_Iterable[int]] = ..., trained_rounds: _Optional[int] = ..., trained_round_tokens: _Optional[int] = ..., arm_drafted_rounds: _Optional[_Mapping[str, int]] = ..., arm_round_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("value", "source", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    value: float
    source: str
    parts: _containers.ScalarMap[str, float]
    def __init__(self, value: _Optional[float] = ..., source: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...
