"""Adjusts logits, and draws a token as argmax(logits / temperature + Gumbel noise).

The functions are pure. For a logit l of a token v in the prompt or the response, with c(v) its
count in the response alone:
  1. repetition r (Keskar et al. 2019, CTRL, section 4.1; sign rule of transformers):
     l / r where l > 0, else l * r,                for tokens of prompt and response
  2. frequency f and presence p (OpenAI API reference):
     l - f * c(v) - p * [c(v) > 0],                for tokens of the response
  3. bias b (OpenAI API reference):
     l + b(v)
All adjustments precede the temperature, hence also top_k, top_p and min_p. Reported log-probs use
the raw logits (models/sampling.py). A neutral value (r = 1, f = p = 0) preserves every bit of a
float32 logit.

Under speculation, the response at a draft node is the emitted tokens and the drafts on the path to
the node. So each node has its own counts. Its adjusted logits equal the adjusted logits of decoding
without drafts.

The draw is a pure function of logits, seed and position. This module computes the counter-based
noise, the masks and the behavior log-prob, independently of batches, caches and speculation.
models/sampling.py adjusts logits before the draw.

Noise of token v at absolute position t of a request with seed s, in 64-bit integers that wrap:
  mix(z)     = splitmix64's finaliser (Steele, Lea, Flood 2014):
               z ^= z >>> 30; z *= BF58476D1CE4E5B9; z ^= z >>> 27; z *= 94D049BB133111EB;
               z ^= z >>> 31
  key(s,t)   = mix(mix(s + G) + t * G),  G = 9E3779B97F4A7C15
  u(s,t,v)   = ((mix(key(s,t) + (v + 1) * G) >>> 11) + 0.5) * 2^-53,  in (0, 1)
  noise      = -log(-log(u)),  float64
Every number depends on (s, t, v) alone, so the rest of the batch does not affect the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def node_counts(base: Tensor, token_ids: Tensor, parents: Tensor | None = None) -> Tensor:
    """Counts of the response's tokens at every node of a draft chain or tree.

    `base` [B, V]: counts at the root, including the root's own token. `token_ids` int64 [B, Q]:
    column 0 is the root; -1 for an absent node. `parents` int64 [B, Q]: column of each node's
    parent, smaller than its own. It is -1 for the root and for an absent node. None means a chain:
    the parent of node i is i - 1.

    Returns base's dtype [B, Q, V]. An absent node has the counts of its parent, or of the root.
    """
    batch, nodes = token_ids.shape
    if parents is None:
        parents = torch.arange(-1, nodes - 1, device=base.device).expand(batch, nodes)
    added = ((token_ids >= 0) & (parents >= 0)).to(base.dtype)
    parents, token_ids = parents.clamp(min=0), token_ids.clamp(min=0)
    counts = base[:, None].repeat(1, nodes, 1)
    rows = torch.arange(batch, device=base.device)
    for node in range(1, nodes):
        counts[:, node] = counts[rows, parents[:, node]]
        counts[rows, node, token_ids[:, node]] += added[:, node]
    return counts


def node_depths(token_ids: Tensor, parents: Tensor | None = None) -> Tensor:
    """Drafts on the path to every node of a chain or tree, int64 [B, Q]; 0 at the root.

    token_ids, parents: as node_counts takes them; where there is no node the number means nothing.
    """
    batch, nodes = token_ids.shape
    places = torch.arange(nodes, device=token_ids.device).repeat(batch, 1)
    if parents is None:
        return places
    above, depths = parents.clamp(min=0), torch.zeros_like(places)
    for _ in range(nodes):  # as deep as the deepest node; absent nodes may form a circle
        if not bool(places.any()):
            break
        depths += places > 0
        places = above.gather(1, places)
    return depths


def penalised(
    logits: Tensor,
    prompt_holds: Tensor,
    counts: Tensor,
    strengths: Sequence[tuple[float, float, float]],
) -> Tensor:
    """Steps 1 and 2 of the module docstring.

    logits [B, Q, V]; prompt_holds bool [B, V]; counts [B, Q, V] of the response's tokens;
    strengths: (r, f, p) of each row, (1, 0, 0) is off. Returns float32 [B, Q, V].
    """
    rows = torch.tensor(strengths, dtype=torch.float32, device=logits.device)
    repetition, frequency, presence = rows.t()[:, :, None, None]
    logits, drawn = logits.float(), counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(drawn | prompt_holds[:, None], repeated, logits)
    return logits - frequency * counts - presence * drawn


def add_bias_(logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Step 3 of the module docstring, in place.

    logits [Q, V] of one request; token_ids int64 [K], all different; values [K].
    """
    logits[:, token_ids] += values


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


def _wrapped(value: int) -> int:
    """The int64 of the same value modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix_(z: Tensor) -> Tensor:
    # `>>` on int64 copies the sign bit down: the mask makes it a logical shift.
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MULTIPLIER_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MULTIPLIER_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


@lru_cache(maxsize=8)
def _token_counters(vocab: int, device: torch.device) -> Tensor:
    return (torch.arange(vocab, dtype=torch.int64, device=device) + 1) * _GOLDEN


def uniform(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """u(s, t, v) of the module docstring for every token.

    seeds, positions: int64 [N]. Returns float64 [N, V] in (0, 1).
    """
    keys = _keys(seeds, positions)
    return _to_unit(_mix_(keys[:, None] + _token_counters(vocab, keys.device)))


def uniform_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """u(s, t, v) of chosen tokens; seeds, positions int64 [N], tokens int64 [N] or [N, C].

    Returns float64 in (0, 1), of the tokens' shape.
    """
    keys = _keys(seeds, positions).view(-1, *[1] * (tokens.dim() - 1))
    return _to_unit(_mix_(keys + (tokens + 1) * _GOLDEN))


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    return _mix_(_mix_(seeds + _GOLDEN) + positions * _GOLDEN)


def _to_unit(z: Tensor) -> Tensor:
    return (z >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).add_(0.5).mul_(2.0**-53)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """-log(-log u), float64 [N, V]; seeds, positions: int64 [N]."""
    return _gumbel(uniform(seeds, positions, vocab))


def _gumbel(units: Tensor) -> Tensor:
    return units.log_().neg_().log_().neg_()


MASKS: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Parameters that exclude tokens, with the values that disable them."""
CANDIDATES = 256
MORE_CANDIDATES = 4096
"""Numbers of a row's likeliest tokens that a masked draw sorts first, and next if its masks keep
more. A row is sorted whole only if they keep more than both."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Per-row settings of a draw; N rows."""

    seeds: Tensor
    """int64 [N]"""
    temperatures: Tensor
    """float32 [N]; 0 = argmax"""
    top_k: Tensor
    """int64 [N]; 0 = all"""
    top_p: Tensor
    """float32 [N]; 1 = all"""
    min_p: Tensor
    """float32 [N]; 0 = all"""
    any_greedy: bool = True
    """False promises that no temperature is 0."""
    all_greedy: bool = False
    """True promises that every temperature is 0."""
    any_masked: bool = True
    """False promises that no row excludes a token."""

    @classmethod
    def of(
        cls,
        seeds: Sequence[int],
        temperatures: Sequence[float],
        *,
        device: torch.device | None = None,
        **masks: Sequence[float],
    ) -> DrawParams:
        """Rows from plain numbers; seeds of any size are taken modulo 2^64. masks: see MASKS."""
        given = {name: masks.get(name) or [off] * len(seeds) for name, off in MASKS.items()}
        return cls(
            torch.tensor([_wrapped(seed) for seed in seeds], dtype=torch.int64, device=device),
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            **{
                name: torch.tensor(given[name], dtype=torch.tensor(off).dtype, device=device)
                for name, off in MASKS.items()
            },
            any_greedy=any(value <= 0 for value in temperatures),
            all_greedy=all(value <= 0 for value in temperatures),
            any_masked=any(set(given[name]) != {off} for name, off in MASKS.items()),
        )

    def rows(self, index: Tensor) -> DrawParams:
        """The rows int64 [M], in this order."""
        names = ("seeds", "temperatures", *MASKS)
        picked: dict[str, Any] = {
            name: getattr(self, name).index_select(0, index) for name in names
        }
        return replace(self, **picked)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row; N rows."""

    tokens: Tensor
    """int64 [N]"""
    logprobs: Tensor
    """float32 [N]: behavior log-prob of the token."""
    gaps: Tensor
    """float64 [N]: perturbed top value minus the second."""


def behavior_logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log_softmax(logits / temperature) over the full vocabulary, float32 [N, V]; temperature 0
    counts as 1.
    """
    safe = torch.where(temperatures > 0, temperatures, 1.0)
    return torch.log_softmax(logits.float() / safe[:, None], dim=-1)


def top_alternatives(
    logits: Tensor, temperature: float, count: int
) -> list[tuple[tuple[int, float], ...]]:
    """Most likely tokens of each row with their behavior log-probs, the likeliest first.

    logits [n, V], raw, of one request; -inf where a grammar forbids a token, which is then left
    out. Returns n rows of at most min(count, V) pairs (token id, log-prob).
    """
    logprobs = behavior_logprobs(
        logits, torch.full((len(logits),), temperature, device=logits.device)
    )
    top = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    return [
        tuple((token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf)
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def draw(
    logits: Tensor, positions: Tensor, params: DrawParams, adjusted: Tensor | None = None
) -> Draw:
    """Draws the token AT each position from the logits of the position before it.

    `logits` [N, V]; `positions` int64 [N]; `adjusted` [N, V]: logits after penalties and bias, None
    if no row has any. Token, masks and gap use the adjusted logits. The log-prob uses the raw
    logits, as in a trainer's recomputation and OpenAI's API. See the module docstring for the
    formula.
    """
    logprobs = behavior_logprobs(logits, params.temperatures)
    # log_softmax shifts a row by a constant, which moves no argmax and leaves the top-two gap as it
    # is.
    scores = logprobs if adjusted is None else behavior_logprobs(adjusted, params.temperatures)
    masked = params.any_masked and scores.device.type == "cpu"
    sizes = (CANDIDATES, MORE_CANDIDATES) if masked else ()
    tokens, gaps = _draw_of_few(scores, positions, params, sizes)
    return Draw(tokens, logprobs.gather(1, tokens[:, None])[:, 0], gaps)


def draw_likely(logits: Tensor, positions: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] and gaps float64 [N] as of `draw`, among the CANDIDATES likeliest tokens of
    each row alone: for drafts.
    """
    columns, scores = perturbed_scores(logits, positions, params, CANDIDATES)
    top = scores.topk(2, dim=-1)
    return columns.gather(1, top.indices[:, :1])[:, 0], top.values[:, 0] - top.values[:, 1]


def perturbed_scores(
    logits: Tensor,
    positions: Tensor,
    params: DrawParams,
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `count` likeliest columns of each row, and their values that `draw` would compare.

    logits [N, C]; positions int64 [N]; token_ids int64 [C]: tokens of the columns, None if each
    column is its own number. Returns int64 [N, K] and float64 [N, K].
    """
    count = min(2 if params.all_greedy else count, logits.shape[-1])
    scores, columns = logits.topk(count, dim=-1)
    scores = behavior_logprobs(scores, params.temperatures).double()
    if params.all_greedy:
        return columns, scores
    if params.any_masked:
        scores.masked_fill_(~_kept(scores, params), float("-inf"))
    tokens = columns if token_ids is None else token_ids[columns]
    return columns, _perturb(scores, positions, params, tokens)


def _draw_of_few(
    scores: Tensor, positions: Tensor, params: DrawParams, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] and gaps float64 [N] of log-probs [N, V], from the likeliest tokens of each
    row where the masks exclude all other tokens. sizes: ascending numbers of tokens to try.
    """
    if not sizes or scores.shape[-1] <= sizes[0]:
        return _top_two(mask_scores(scores.double(), params), positions, params)
    ordered, ids = scores.topk(sizes[0], dim=-1)
    ordered = ordered.double()
    kept = _kept(ordered, params)
    drawn, gaps = _top_two(ordered.masked_fill_(~kept, float("-inf")), positions, params, ids)
    tokens = ids.gather(1, drawn[:, None])[:, 0]
    rest = kept[:, -1].nonzero()[:, 0]
    if len(rest):
        tokens[rest], gaps[rest] = _draw_of_few(
            scores[rest], positions[rest], params.rows(rest), sizes[1:]
        )
    return tokens, gaps


def _top_two(
    scores: Tensor, positions: Tensor, params: DrawParams, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Columns int64 [N] of the best perturbed scores [N, C], and the gaps to the second best.

    ids int64 [N, C]: tokens of the columns; None: each column's own number.
    """
    if not params.all_greedy:
        scores = _perturb(scores, positions, params, ids)
    top = scores.topk(2, dim=-1)
    return top.indices[:, 0], top.values[:, 0] - top.values[:, 1]


def _perturb(scores: Tensor, positions: Tensor, params: DrawParams, ids: Tensor | None) -> Tensor:
    """Scores [N, C] with the noise of their tokens; rows of temperature 0 as they are."""
    if ids is None:
        noise = gumbel_noise(params.seeds, positions, scores.shape[-1])
    else:
        noise = _gumbel(uniform_of(params.seeds, positions, ids))
    if params.any_greedy:
        noise.masked_fill_((params.temperatures <= 0)[:, None], 0.0)
    return noise.add_(scores)


def mask_scores(scores: Tensor, params: DrawParams) -> Tensor:
    """Scores [N, V] (log-probs) with -inf for tokens that top_k, then top_p, then min_p excludes.

    All ties at the k-th score are kept. top_p keeps the smallest set with at least this mass. min_p
    is relative to the most likely token. Neither top_k nor top_p renormalises: masses refer to the
    full vocabulary. Rows without masks stay as they are.
    """
    if not params.any_masked:
        return scores
    ordered, ids = scores.sort(dim=-1, descending=True)
    kept = torch.empty_like(ids, dtype=torch.bool).scatter_(1, ids, _kept(ordered, params))
    return scores.masked_fill(~kept, float("-inf"))


def _kept(ordered: Tensor, params: DrawParams) -> Tensor:
    """Whether each of a row's likeliest tokens passes the masks, bool [N, C]; descending log-probs
    [N, C].
    """
    count = ordered.shape[-1]
    k = torch.where(params.top_k > 0, params.top_k.clamp(max=count), count)
    mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    in_mass = (mass_before < params.top_p.double()[:, None]) | (params.top_p >= 1.0)[:, None]
    in_mass[:, 0] = True
    floor = ordered[:, :1] + params.min_p.double()[:, None].log()
    return in_mass & (ordered >= ordered.gather(1, (k - 1)[:, None])) & (ordered >= floor)
