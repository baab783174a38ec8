"""Random EAGLE-3 drafters and rows, and the network in float64 numpy as the paper describes it, one
row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.models.config import ModelConfig, RopeConfig
from paceline.speculators.eagle3 import Eagle3Net, Eagle3Options
from paceline.speculators.packed import PackedRow

Array = npt.NDArray[np.float64]

TARGET = ModelConfig(
    family="qwen3",
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    qk_norm=True,
    rope=RopeConfig(theta=100.0),
)
LAYERS = "1,2,4,5,last"
"""More states than the drafter reads (2, 4, 5 of 8 layers), so that columns must be found by name.
"""


def rough_net(target: ModelConfig = TARGET, **options: object) -> Eagle3Net:
    """A net in which every weight matters, bound to a random target."""
    generator = torch.Generator().manual_seed(5)
    net = Eagle3Net.fresh(target, Eagle3Options.model_validate(options), 3)
    if net.options.draft_vocab_size:
        net.choose_tokens(torch.randint(0, 9, (target.vocab_size,), generator=generator))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    shape = (target.vocab_size, target.hidden_size)
    net.bind(torch.randn(shape, generator=generator), 0.5 * torch.randn(shape, generator=generator))
    return net


def row_of(
    states: Tensor,
    tokens: Tensor,
    valid: Tensor | None = None,
    layers: str = LAYERS,
    hidden: int = TARGET.hidden_size,
) -> PackedRow:
    """One document: states [T + 1, W] of tokens int64 [T + 2]."""
    count = len(tokens) - 2
    return PackedRow(
        states=states[:-1],
        next_states=states[1:, -hidden:],
        next_tokens=tokens[1:-1],
        draft_tokens=tokens[2:],
        positions=torch.arange(count),
        documents=torch.zeros(count, dtype=torch.int64),
        valid=torch.ones(count, dtype=torch.bool) if valid is None else valid,
        lm_head_hash="",
        layers=layers,
    )


def document(length: int, seed: int) -> PackedRow:
    """A random document of `length` positions; about a third are no drafting targets."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(
        length + 1, TARGET.hidden_size * len(LAYERS.split(",")), generator=generator
    )
    tokens = torch.randint(0, TARGET.vocab_size, (length + 2,), generator=generator)
    return row_of(states, tokens, torch.rand(length, generator=generator) < 0.7)


def packed(rows: Sequence[PackedRow]) -> PackedRow:
    """Documents one after the other in one row."""
    return PackedRow(
        states=torch.cat([row.states for row in rows]),
        next_states=torch.cat([row.next_states for row in rows]),
        next_tokens=torch.cat([row.next_tokens for row in rows]),
        draft_tokens=torch.cat([row.draft_tokens for row in rows]),
        positions=torch.cat([row.positions for row in rows]),
        documents=torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)]),
        valid=torch.cat([row.valid for row in rows]),
        lm_head_hash="",
        layers=rows[0].layers,
    )


def arrays(net: Eagle3Net) -> dict[str, Array]:
    """Its weights and the target's in float64."""
    named = {name: value.detach() for name, value in net.state_dict().items()} | {
        "embed": net.embed,
        "head": net.head,
    }
    return {name: value.double().numpy() for name, value in named.items()}


def inner_of(row: PackedRow) -> Array:
    """The states entering layers 2, 4 and 5, [T, 3 H], of a row with LAYERS."""
    h = TARGET.hidden_size
    states = row.states.double().numpy()
    return np.concatenate(
        [states[:, h : 2 * h], states[:, 2 * h : 3 * h], states[:, 3 * h : 4 * h]], axis=1
    )


def softmax(x: Array) -> Array:
    """Return the softmax of a vector."""
    e: Array = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def rms_normed(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + TARGET.rms_norm_eps) * weight)


def rotated(x: Array, position: int) -> Array:
    """One head; numbers j and j + d/2 are a complex number that turns by position *
    theta^(-2j/d).
    """
    half = len(x) // 2
    turn = np.exp(1j * position * TARGET.rope.theta ** (-np.arange(half) / half))
    turned = (x[:half] + 1j * x[half:]) * turn
    return np.concatenate([turned.real, turned.imag])


def last_output(
    w: dict[str, Array],
    g: list[Array],
    tokens: Sequence[int],
    positions: Sequence[int],
    norm_first: bool,
) -> Array:
    """The layer's output before the final norm at the last of the rows (feature g, token,
    position).
    """
    dim, heads, group = TARGET.head_dim, TARGET.num_heads, TARGET.num_heads // TARGET.num_kv_heads
    p = "midlayer."
    keys, values = [], []
    for feature, token, position in zip(g, tokens, positions, strict=True):
        normed = rms_normed(feature, w[p + "hidden_norm.weight"])
        x = np.concatenate([rms_normed(w["embed"][token], w[p + "input_layernorm.weight"]), normed])
        k = (w[p + "self_attn.k_proj.weight"] @ x).reshape(-1, dim)
        keys.append([rotated(one, position) for one in k])
        values.append((w[p + "self_attn.v_proj.weight"] @ x).reshape(-1, dim))
    q = (w[p + "self_attn.q_proj.weight"] @ x).reshape(-1, dim)
    attended = []
    for head in range(heads):
        turned, kv = rotated(q[head], positions[-1]), head // group
        weights = softmax(np.array([turned @ key[kv] for key in keys]) / np.sqrt(dim))
        attended.append(
            sum(weight * value[kv] for weight, value in zip(weights, values, strict=True))
        )
    h = (normed if norm_first else g[-1]) + w[p + "self_attn.o_proj.weight"] @ np.concatenate(
        attended
    )
    y = rms_normed(h, w[p + "post_attention_layernorm.weight"])
    gate, up = w[p + "mlp.gate_proj.weight"] @ y, w[p + "mlp.up_proj.weight"] @ y
    return np.asarray(h + w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))


def chain_from(
    w: dict[str, Array],
    inner: Array,
    next_tokens: Sequence[int],
    t: int,
    steps: int,
    norm_first: bool = False,
) -> list[Array]:
    """Logits by draft id of a chain from row t of one document, while its true tokens last: a
    causal decoder's rows.

    Rows 0 .. t come from true states; each step adds a row of its own output, one position on.
    """
    g = [w["fc.weight"] @ row for row in inner[: t + 1]]
    logits = []
    for step in range(min(steps, len(next_tokens) - t)):
        out = last_output(w, g, next_tokens[: t + 1 + step], range(t + 1 + step), norm_first)
        logits.append(w["lm_head.weight"] @ rms_normed(out, w["norm.weight"]))
        g.append(out)
    return logits
