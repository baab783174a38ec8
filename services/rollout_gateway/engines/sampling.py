"""Sampling parameters of a request, with their ranges and checks.

This is the only list. The HTTP API bodies take their ranges from RANGES, and the gateway and all
engines check requests with `check_sampling`. The defaults determine the trainable requests.
"""

from dataclasses import dataclass, fields

from paceline.errors import InvalidInput
from paceline.trajectory import INT_LIMIT, TEMPERATURE, Range

UNSEEDED = -1
"""Seed of a request without an explicit seed."""
MAX_BIASED_TOKENS = 300
"""Maximum entries of a request's logit bias."""

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
"""Maximum number of stop texts, and their maximum length in characters. Every token is checked
against each text.
"""
MAX_STOP_TOKENS = 1024
"""Maximum number of token ids that end a response."""
MAX_ALLOWED_TOKENS = 4096
"""Maximum number of token ids in allowed_token_ids."""
TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"
"""Error reason for a prompt longer than the model's context."""
UNSCORED = -1
"""prompt_logprobs of a request without prompt scores."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, named as in proto SamplingParams; each default disables its parameter.

    Log-probs are log_softmax(logits / temperature) of the raw logits; penalties, bias, top_p, top_k
    and min_p do not change them. With a json_schema, regex, choice or grammar, the logits are
    masked first.
    """

    seed: int  # UNSEEDED: drawn when the request is sent to an engine
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # (token id, bias), token ids ascending and distinct
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str = ""  # JSON schema of the response; "{}": any JSON object; "": none
    min_tokens: int = 0  # before this length, stops are neither drawn nor matched
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens drawn, ascending and distinct
    prompt_logprobs: int = UNSCORED  # number of alternatives reported for each prompt token
    include_stop_str_in_output: bool = False  # affects only the text; the tokens always include it
    regex: str = ""  # matches the whole response
    choice: tuple[str, ...] = ()  # allowed responses
    grammar: str = ""  # Lark or GBNF, for the whole response
    tool_grammar: str = ""  # Lark, made from the offered tools: tool calls follow it
    free_until: str = ""  # the requirements above apply after this text

    @property
    def scored(self) -> bool:
        """Whether log-probs of the prompt are requested."""
        return self.prompt_logprobs != UNSCORED

    @property
    def confined(self) -> bool:
        """Whether some tokens are forbidden, at least at the beginning."""
        return bool(self.min_tokens or self.allowed_token_ids)

    @property
    def structured(self) -> bool:
        """Whether a grammar limits the next tokens."""
        text = self.json_schema or self.regex or self.grammar or self.tool_grammar
        return bool(text or self.choice)

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the draw."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def adjusted(self) -> bool:
        """Whether logits change before the draw."""
        return self.penalised or bool(self.logit_bias) or self.confined


RANGES = {
    "max_tokens": Range(1, INT_LIMIT - 1),
    "temperature": TEMPERATURE,
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0, INT_LIMIT - 1),
    "min_p": Range(0, 1),
    "top_logprobs": Range(0, 20),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.1, 10),
    "min_tokens": Range(0, INT_LIMIT - 1),
    "prompt_logprobs": Range(UNSCORED, 20),
}
BIAS = Range(-100, 100)
RECOMPUTED = {"temperature"}
"""Parameters that the policy trainer applies when it recomputes log-probs."""
_ENDS = {"max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"}
NO_EFFECT = {"seed", "top_logprobs", "prompt_logprobs", *_ENDS}
"""Parameters that do not change the log-prob of a drawn token."""
_TRAINED = RECOMPUTED | NO_EFFECT
_UNTRAINED = {one.name: one.default for one in fields(Sampling) if one.name not in _TRAINED}
"""All other parameters, with the values that disable them."""
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES)
"""Parameters that a session may override. The remaining parameters are requirements on the answer.
"""


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidInput naming the invalid parameter."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        nothing = name == "max_tokens" and value == 0 and sampling.scored
        if not (allowed.holds(value) or nothing):
            raise InvalidInput(f"{name} is out of range", seen=value, allowed=allowed)

    _check_stops(sampling)
    _check_tokens(sampling, vocab_size)
    for token, bias in sampling.logit_bias:
        if not BIAS.holds(bias):
            message = f"logit_bias of token {token} is out of range"
            raise InvalidInput(message, seen=bias, allowed=BIAS)
    if sampling.min_tokens > sampling.max_tokens:
        message = "min_tokens is above max_tokens"
        raise InvalidInput(message, seen=sampling.min_tokens, allowed=sampling.max_tokens)
    if sampling.confined and sampling.structured:
        name = "min_tokens" if sampling.min_tokens else "allowed_token_ids"
        message = f"{name} and a form of the answer may contradict each other"
        raise InvalidInput(message, seen="both", allowed="one of the two")


def _check_stops(sampling: Sampling) -> None:
    if not all(sampling.stop):
        raise InvalidInput("stop holds an empty string", seen="''", allowed="non-empty strings")
    stops = {
        "stop has too many texts": (len(sampling.stop), MAX_STOPS),
        "stop holds too long a text": (max(map(len, sampling.stop), default=0), MAX_STOP_LENGTH),
    }
    for wrong, (seen, most) in stops.items():
        if seen > most:
            raise InvalidInput(wrong, seen=seen, allowed=f"at most {most}")


def _check_tokens(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidInput for too many token ids, or for an id outside the vocabulary."""
    for name, ids, most in (
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKENS),
        ("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ("logit_bias", [token for token, _ in sampling.logit_bias], MAX_BIASED_TOKENS),
    ):
        if len(ids) > most:
            message = f"{name} has too many entries"
            raise InvalidInput(message, seen=len(ids), allowed=f"at most {most}")
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            message = f"{name} names a token out of range"
            raise InvalidInput(message, seen=wrong, allowed=f"0 to {vocab_size - 1}")


def check_length(tokens: int, longest: int) -> None:
    """Raises InvalidInput unless the prompt has 1 to `longest` tokens."""
    if not 1 <= tokens <= longest:
        reason = TOO_LONG if tokens > longest else None
        seen, allowed = f"{tokens} tokens", f"1 to {longest} tokens"
        raise InvalidInput("prompt does not fit", reason=reason, seen=seen, allowed=allowed)


def check_prompt(prompt: tuple[int, ...], vocab_size: int, max_sequence_tokens: int) -> None:
    """Raises InvalidInput for a wrong prompt length, or for a token id outside the vocabulary."""
    check_length(len(prompt), max_sequence_tokens - 1)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        seen = max(prompt) if min(prompt) >= 0 else min(prompt)
        message = "prompt holds a token id out of range"
        raise InvalidInput(message, seen=seen, allowed=f"0 to {vocab_size - 1}")


def untrainable(sampling: Sampling) -> dict[str, object]:
    """Returns the parameters, with their values, that make log-probs impossible to recompute."""
    asked: dict[str, object] = {name: getattr(sampling, name) for name in _UNTRAINED}
    found = {name: value for name, value in asked.items() if value != _UNTRAINED[name]}
    if not sampling.temperature > 0:
        found["temperature"] = sampling.temperature
    return found
