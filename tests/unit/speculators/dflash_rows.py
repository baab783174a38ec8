"""Random DFlash drafters, and a block in float64 numpy as the paper describes it, one query of one
head at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from unit.speculators.eagle3_rows import TARGET, Array, inner_of, rms_normed, rotated, softmax

from paceline.models.config import ModelConfig
from paceline.speculators.dflash import DflashNet, DflashOptions
from paceline.speculators.packed import PackedRow

BLOCK, MASK, GAMMA = 5, 11, 3.0


def rough_net(target: ModelConfig = TARGET, seed: int = 5, **options: object) -> DflashNet:
    """A net in which every weight matters, bound to a random target."""
    generator = torch.Generator().manual_seed(seed)
    given = {"block_size": BLOCK, "mask_token_id": MASK, "gamma": GAMMA, "layers": 2, **options}
    net = DflashNet.fresh(target, DflashOptions.model_validate(given), 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    shape = (target.vocab_size, target.hidden_size)
    net.bind(torch.randn(shape, generator=generator), 0.5 * torch.randn(shape, generator=generator))
    return net


def arrays(net: DflashNet) -> dict[str, Array]:
    """Its weights and the target's in float64."""
    named = {name: value.detach() for name, value in net.state_dict().items()} | {
        "embed": net.embed,
        "head": net.head,
    }
    return {name: value.double().numpy() for name, value in named.items()}


def block_logits(
    w: dict[str, Array],
    inner: Array,
    positions: Sequence[int],
    token: int,
    first: int,
    size: int = BLOCK,
) -> Array:
    """Logits [size - 1, V] at the MASKs of a block that begins with `token` at position `first`.

    inner [T, 3 H]: the fused states of all tokens before it, at `positions`.
    """
    context = [rms_normed(w["fc.weight"] @ one, w["hidden_norm.weight"]) for one in inner]
    block = [w["embed"][one] for one in (token, *[MASK] * (size - 1))]
    places = [first + offset for offset in range(size)]
    layers = len({name.split(".")[1] for name in w if name.startswith("layers.")})
    for layer in range(layers):
        block = decoder_layer(w, f"layers.{layer}.", context, list(positions), block, places)
    return np.stack([w["head"] @ rms_normed(one, w["norm.weight"]) for one in block[1:]])


def decoder_layer(
    w: dict[str, Array],
    p: str,
    context: list[Array],
    context_at: list[int],
    block: list[Array],
    block_at: list[int],
) -> list[Array]:
    """Compute a pre-norm Qwen3 layer over the block alone; context keys and values have no
    pre-norm.
    """
    heads, group = TARGET.num_heads, TARGET.num_heads // TARGET.num_kv_heads
    dim, a = TARGET.head_dim, p + "self_attn."
    inputs = [rms_normed(one, w[p + "input_layernorm.weight"]) for one in block]
    keys, values = [], []
    for x, at in zip([*context, *inputs], [*context_at, *block_at], strict=True):
        k = (w[a + "k_proj.weight"] @ x).reshape(-1, dim)
        keys.append([rotated(rms_normed(one, w[a + "k_norm.weight"]), at) for one in k])
        values.append((w[a + "v_proj.weight"] @ x).reshape(-1, dim))
    outs = []
    for residual, x, at in zip(block, inputs, block_at, strict=True):
        q = (w[a + "q_proj.weight"] @ x).reshape(-1, dim)
        attended = []
        for head in range(heads):
            turned = rotated(rms_normed(q[head], w[a + "q_norm.weight"]), at)
            scores = np.array([turned @ key[head // group] for key in keys]) / np.sqrt(dim)
            weights = softmax(scores)
            attended.append(
                sum(weights[i] * value[head // group] for i, value in enumerate(values))
            )
        h = residual + w[a + "o_proj.weight"] @ np.concatenate(attended)
        y = rms_normed(h, w[p + "post_attention_layernorm.weight"])
        gate, up = w[p + "mlp.gate_proj.weight"] @ y, w[p + "mlp.up_proj.weight"] @ y
        outs.append(h + w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
    return outs


def formula(
    w: dict[str, Array], rows: Sequence[PackedRow], *, drawn: bool = False, size: int = BLOCK
) -> dict[str, float]:
    """Sums of the paper's loss over documents, a block at each drafting target, one draft at a
    time.
    """
    terms = {f"loss_{k}": 0.0 for k in range(size - 1)} | {"loss": 0.0, "correct": 0.0}
    for row in rows:
        inner, valid = inner_of(row), row.valid.tolist()
        for t in (here for here in range(len(row)) if valid[here]):
            logits = block_logits(
                w, inner[: t + 1], range(t + 1), int(row.next_tokens[t]), t + 1, size
            )
            for k in range(size - 1):
                if t + k >= len(row) or not valid[t + k]:
                    break
                q = softmax(logits[k])
                p = softmax(w["head"] @ row.next_states[t + k].double().numpy())
                token = int(row.draft_tokens[t + k])
                loss = -np.log(q[token]) if drawn else -(p * np.log(q)).sum()
                terms["loss"] += np.exp(-k / GAMMA) * loss
                terms[f"loss_{k}"] += loss
                if k == 0:
                    terms["correct"] += q.argmax() == (token if drawn else p.argmax())
    return terms
