"""How the tokens of a request are drawn: the parameters, their ranges, and the check of both.

The one list: bodies of the HTTP APIs take their ranges from RANGES, the gateway and every engine
refuse by `check_sampling`, and what may be trained follows from the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.errors import InvalidInput
from paceline.trajectory import INT_LIMIT, TEMPERATURE, Range

UNSEEDED = -1
"""Seed of a request for which nobody has named one."""
MAX_BIASED_TOKENS = 300
"""Entries of a request's logit bias at most."""

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
"""Texts that end a response, and characters of one, at most: each is looked for at every token."""
MAX_STOP_TOKENS = 1024
"""Token ids that end a response at most."""
MAX_ALLOWED_TOKENS = 4096
"""Token ids that a response is confined to at most."""
TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"
"""Reason of the error for a prompt that the model cannot read."""
UNSCORED = -1
"""prompt_logprobs of a request whose prompt is not scored."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The names are those of proto SamplingParams; a default switches off.

    Log-probs are of log_softmax(logits / temperature) of the model's own logits, whatever
    penalties, bias, top_p, top_k and min_p do. With a json_schema, a regex, a choice or a grammar
    they are of the logits that its mask leaves.
    """

    seed: int  # UNSEEDED: drawn when the request goes to an engine
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
    # (token id, what is added), token ids ascending and distinct
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str = ""  # JSON schema of the response; "{}" is any JSON object, "" none
    min_tokens: int = 0  # before them no stop is drawn or looked for
    allowed_token_ids: tuple[int, ...] = ()  # the only ones drawn, ascending and distinct
    prompt_logprobs: int = UNSCORED  # alternatives of each prompt token, whose log-probs are told
    include_stop_str_in_output: bool = False  # of the text alone; the tokens keep it anyway
    regex: str = ""  # the whole response matches it
    choice: tuple[str, ...] = ()  # the response is one of these
    grammar: str = ""  # of the response: Lark or GBNF
    tool_grammar: str = ""  # Lark, made from the tools offered: calls follow it
    free_until: str = ""  # text behind which the response has to be all that

    @property
    def scored(self) -> bool:
        """Whether log-probs of the prompt are asked for."""
        return self.prompt_logprobs != UNSCORED

    @property
    def confined(self) -> bool:
        """Whether some tokens may not be drawn, at least in the beginning."""
        return bool(self.min_tokens or self.allowed_token_ids)

    @property
    def structured(self) -> bool:
        """Whether a grammar says which tokens may follow."""
        text = self.json_schema or self.regex or self.grammar or self.tool_grammar
        return bool(text or self.choice)

    @property
    def penalised(self) -> bool:
        """Whether the draw depends on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def adjusted(self) -> bool:
        """Whether anything changes the logits before the draw."""
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
"""What the policy trainer follows when it computes log-probs again."""
NO_EFFECT = {
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "top_logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
}
"""What changes no log-prob of a token that was drawn."""
_UNTRAINED = {
    field.name: field.default
    for field in fields(Sampling)
    if field.name not in RECOMPUTED | NO_EFFECT
}
"""The others, with the values under which they change nothing."""
OVERRIDABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""What a session may draw otherwise than was asked for; the rest says what an answer has to be."""


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidInput naming the parameter that cannot work."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        nothing = name == "max_tokens" and value == 0 and sampling.scored
        if not (allowed.holds(value) or nothing):
            raise InvalidInput(f"{name} is out of range", seen=value, allowed=allowed)

    _check_stops(sampling)
    _check_tokens(sampling, vocab_size)
    for token, bias in sampling.logit_bias:
        if not BIAS.holds(bias):
            raise InvalidInput(
                f"logit_bias of token {token} is out of range", seen=bias, allowed=BIAS
            )
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidInput(
            "min_tokens is above max_tokens", seen=sampling.min_tokens, allowed=sampling.max_tokens
        )
    if sampling.confined and sampling.structured:
        name = "min_tokens" if sampling.min_tokens else "allowed_token_ids"
        raise InvalidInput(
            f"{name} and a form of the answer may contradict each other",
            seen="both",
            allowed="one of the two",
        )


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
    """Raises InvalidInput for a parameter that names too many tokens, or one that there is not."""
    for name, ids, most in (
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKENS),
        ("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ("logit_bias", [token for token, _ in sampling.logit_bias], MAX_BIASED_TOKENS),
    ):
        if len(ids) > most:
            raise InvalidInput(
                f"{name} has too many entries", seen=len(ids), allowed=f"at most {most}"
            )
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidInput(
                f"{name} names a token out of range", seen=wrong, allowed=f"0 to {vocab_size - 1}"
            )


def check_length(tokens: int, longest: int) -> None:
    """Raises InvalidInput for a prompt of so many tokens where `longest` are taken."""
    if not 1 <= tokens <= longest:
        raise InvalidInput(
            "prompt does not fit",
            reason=TOO_LONG if tokens > longest else None,
            seen=f"{tokens} tokens",
            allowed=f"1 to {longest} tokens",
        )


def check_prompt(prompt: tuple[int, ...], vocab_size: int, max_sequence_tokens: int) -> None:
    """Raises InvalidInput for tokens that the engine cannot take."""
    check_length(len(prompt), max_sequence_tokens - 1)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        seen = max(prompt) if min(prompt) >= 0 else min(prompt)
        raise InvalidInput(
            "prompt holds a token id out of range", seen=seen, allowed=f"0 to {vocab_size - 1}"
        )


def untrainable(sampling: Sampling) -> dict[str, object]:
    """The parameters, with their values, under which log-probs cannot be computed again."""
    found: dict[str, object] = {
        name: value
        for name, default in _UNTRAINED.items()
        if (value := getattr(sampling, name)) != default
    }
    if not sampling.temperature > 0:
        found["temperature"] = sampling.temperature
    return found
