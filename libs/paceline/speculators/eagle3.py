"""Predicts tokens with one layer over fused inner states of the target: EAGLE-3 (Li et al. 2025,
arXiv 2503.01840), a network that engine and trainer share.

embed_tokens is the target's, by reference. lm_head is its own, over the draft vocabulary.

Alignment: row t = (fc of the inner states of token t, embed(token t + 1)), rotary position t; its
head predicts token t + 2. The first step of a chain reads fc's output; a later step reads the
layer's own output before the final norm.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput, WeightsError
from paceline.models import decoder, loading, products
from paceline.models.config import ModelConfig, parse_config
from paceline.speculators import kinds, layer_drafter, layer_net, net, packed

KIND = kinds.SPECULATORS["eagle3"]
(ARCHITECTURE,) = KIND.architectures
MAP_DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
"""The draft vocabulary's two tensors; all other tensors are weights."""

_VARIANTS = (
    *("bias", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
)
"""Switches of networks with other tensors or another recurrence; the published one has none."""


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens: int64 [size] token ids, ascending. Among equal counts the lower id
    is chosen.

    counts int64 [V]: how often each token was a drafting target. Raises InvalidInput.
    """
    if not 0 < size <= len(counts):
        raise InvalidInput("size of a draft vocabulary", seen=size, allowed=f"1 to {len(counts)}")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def token_maps(token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t int64 [Vd], offsets: token id = draft id + d2t[draft id]; and t2d bool [V]. Both are from
    ascending ids [Vd].
    """
    draft_ids = torch.arange(len(token_ids), device=token_ids.device)
    drafted = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
    drafted[token_ids] = True
    return token_ids - draft_ids, drafted


def check_maps(d2t: Tensor, t2d: Tensor) -> None:
    """Raises WeightsError when d2t leaves the vocabulary, is not ascending, or
    disagrees with t2d.
    """
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = token_ids[(token_ids < 0) | (token_ids >= len(t2d))]
    if len(outside):
        raise WeightsError(
            "d2t names a token outside the vocabulary",
            seen=int(outside[0]),
            allowed=f"< {len(t2d)}",
        )

    if bool((token_ids.diff() <= 0).any()):
        raise WeightsError(
            "d2t is not ascending", seen=token_ids[:8].tolist(), allowed="ascending token ids"
        )

    if not torch.equal(token_maps(token_ids, len(t2d))[1], t2d):
        raise WeightsError(
            "t2d and d2t name other tokens",
            seen=f"t2d: {int(t2d.sum())} tokens",
            allowed=f"the {len(d2t)} of d2t",
        )


def over_tokens(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] by token, from logits [..., Vd] of the tokens int64 [Vd]; -inf for all other
    tokens.
    """
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    full[..., token_ids] = logits
    return full


class Eagle3Options(Config):
    """Settings of an EAGLE-3 drafter."""

    inner_layers: tuple[int, ...] = ()
    """Three decoder layers of the target whose inputs are read; none: 2, L/2 and L-3."""
    draft_vocab_size: int | None = Field(default=None, ge=0)
    """Tokens it can draft, once their frequencies are known; none or 0: all."""
    norm_before_residual: bool = False
    """The layer's residual is the normed state; SGLang knows false only."""
    ttt_steps: int = Field(default=7, ge=1, le=7)
    """Steps of a draft chain that are trained."""
    ttt_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of a step, relative to the one before."""


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the normed embedding beside the normed state."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = layer_net.Attention(config, 2 * width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = layer_net.SwiGlu(config)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        chain: layer_net.Chain | None,
    ) -> Tensor:
        """embedded, hidden [B, T, H] -> [B, T, H]; see Attention.forward for the rest."""
        normed = self.hidden_norm(hidden)
        fused = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(fused, cos, sin, mask, chain)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Net(layer_net.ChainNet):
    """The drafter's network: see DraftNet.

    Sharded as one part, since every step of a chain runs all of it.
    """

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = Eagle3Options

    d2t: Tensor
    """int64 [Vd]: token id = draft id + d2t[draft id]."""
    t2d: Tensor
    """bool [V]: the token can be drafted."""

    def __init__(
        self,
        config: ModelConfig,
        inner: tuple[int, ...],
        options: Eagle3Options | None = None,
        *,
        draft_vocab_size: int = 0,
        seed: int = 0,
    ) -> None:
        """`config`: shape of the layer. `inner`: target layers with inputs that the drafter reads.
        `draft_vocab_size`: 0 for V.
        """
        super().__init__()
        self.config, self.inner = config, inner
        self.options = options or Eagle3Options()
        hidden = config.hidden_size
        self.fc = products.Linear(kinds.INNER_STATES * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(config, self.options.norm_before_residual)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = products.Linear(hidden, draft_vocab_size or config.vocab_size, bias=False)
        d2t, t2d = token_maps(
            torch.arange(draft_vocab_size or config.vocab_size), config.vocab_size
        )
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        layer_net.reset_weights(self, seed)

    @classmethod
    def fresh(cls, target: ModelConfig, options: Eagle3Options, seed: int) -> Self:
        """See DraftNet.fresh; it drafts all tokens until `choose_tokens`. Raises ConfigError for a
        target with too few layers.
        """
        inner = kinds.inner_layers(target.num_layers, options.inner_layers)
        return cls(layer_net.drafter_shape(target, "llama", 1), inner, options, seed=seed)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: Eagle3Options) -> Self:
        """See DraftNet.parse; shape, inner states and vocabulary are the checkpoint's.

        Raises InvalidInput with the key that does not match the target or requests an unsupported
        variant.
        """
        own = layer_net.open_config(raw, KIND, "eagle_config", _VARIANTS)
        layer_net.check_one_layer(raw, target)
        if own.get("use_aux_hidden_state") is False:
            raise InvalidInput("use_aux_hidden_state is not supported", seen=False, allowed=True)
        if raw.get("target_hidden_size", target.hidden_size) != target.hidden_size:
            raise InvalidInput(
                "target_hidden_size differs",
                seen=raw["target_hidden_size"],
                allowed=target.hidden_size,
            )

        size = raw.get("draft_vocab_size")
        if type(size) is not int or not 0 < size <= target.vocab_size:
            allowed = f"1 to {target.vocab_size}: the rows of its own lm_head"
            raise InvalidInput(
                "draft_vocab_size", seen="(none)" if size is None else size, allowed=allowed
            )

        config = parse_config({**raw, "architectures": ["LlamaForCausalLM"]})
        config = replace(config, max_position_embeddings=target.max_position_embeddings)
        inner = layer_net.inner_of(raw, KIND, target, "eagle_aux_hidden_state_layer_ids")
        before = {"norm_before_residual": bool(raw.get("norm_before_residual", False))}
        return cls(config, inner, options.model_copy(update=before), draft_vocab_size=size)

    @property
    def token_ids(self) -> Tensor:
        """int64 [Vd]: the tokens it can draft, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def choose_tokens(self, counts: Tensor) -> None:
        """Limits drafts to the options.draft_vocab_size most frequent tokens. Call it before the
        network is trained or sharded.

        counts int64 [V]: how often each token was a drafting target. Raises InvalidInput.
        """
        vocab_size = self.config.vocab_size
        if len(self.d2t) != vocab_size or len(counts) != vocab_size:
            seen = f"{len(self.d2t)} tokens, counts of {len(counts)}"
            raise InvalidInput(
                "a draft vocabulary is chosen once, of all tokens", seen=seen, allowed=vocab_size
            )

        chosen = frequent_tokens(counts, self.options.draft_vocab_size or vocab_size).to(
            self.d2t.device
        )
        head = products.Linear(self.config.hidden_size, len(chosen), bias=False).to(
            self.lm_head.weight
        )
        head.weight.copy_(self.lm_head.weight[chosen])
        self.lm_head = head
        self.d2t, self.t2d = token_maps(chosen, vocab_size)

    # ---- checkpoints

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json. An id in it is the layer that outputs the state: one less than
        the layer that receives it.
        """
        return layer_net.layer_config_json(self.config, ARCHITECTURE) | {
            "draft_vocab_size": len(self.d2t),
            "norm_before_residual": self.options.norm_before_residual,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [entered - 1 for entered in self.inner],
                "use_aux_hidden_state": True,
            },
        }

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See DraftNet.own_tensors; `layers.0.` is vLLM's name of the layer."""
        return {
            re.sub(r"^layers\.0\.", "midlayer.", name): tensor
            for name, tensor in tensors.items()
            if name != "embed_tokens.weight"
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See DraftNet.check; d2t and t2d must agree."""
        loading.check_tensors(tensors, self.shapes(), MAP_DTYPES)
        check_maps(tensors["d2t"], tensors["t2d"])

    # ---- learning

    def forward(self, row: packed.PackedRow) -> net.Objective:
        """See DraftNet.forward: the training-time test, sum over steps i of ttt_decay^i loss_i.

        Step i at position t is for the draft of token t + 2 + i. It counts if that token is a
        drafting target and its distribution peaks at a draftable token. Positions are the row's
        drafting targets. `correct` and `alpha` are of the first draft, with tokens outside the
        draft vocabulary as misses.
        """
        log_p, drafted = net.teacher_of(row.next_states, self.head, self.t2d)
        taught = row.valid & drafted
        loss, terms = row.next_states.new_zeros(()), {}
        for step, (features, there, inside) in enumerate(self.unroll(row, self.options.ttt_steps)):
            counted = inside & taught[there]
            logits, wanted = self.logits(features[counted]), log_p[there[counted]]
            losses, alpha = net.draft_losses(logits, wanted)
            loss = loss + self.options.ttt_decay**step * losses.sum()
            terms[f"loss_{step}"] = losses.detach().sum()
            if step == 0:
                terms["correct"] = (logits.argmax(-1) == wanted.argmax(-1)).sum()
                terms["alpha"] = alpha.sum()

        return net.Objective(loss, row.valid.sum(), terms)

    def draft_logits(self, step: int, states: Tensor) -> Tensor:
        """See DraftNet.draft_logits."""
        return over_tokens(self.logits(states), self.token_ids, self.config.vocab_size)

    def fused(self, states: Tensor) -> Tensor:
        """See ChainNet.fused."""
        fused: Tensor = self.fc(states)
        return fused

    def features(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        chain: layer_net.Chain | None = None,
    ) -> Tensor:
        """See ChainNet.features; the output before the final norm."""
        embedded = functional.embedding(tokens, self.embed).to(features.dtype)
        seen = None if mask is None else mask[:, None]
        angles = layer_net.rotary_angles(self.config, positions)
        return self.midlayer(embedded, features, *angles, seen, chain)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [..., Vd] by draft id, of features [..., H]."""
        return self.lm_head(self.norm(features))


class Eagle3Drafter(layer_drafter.LayerDrafter[Eagle3Net]):
    """The speculator "eagle3"."""

    net = Eagle3Net

    def _fuse(self, net: Eagle3Net) -> None:
        tensors = {name: value.detach() for name, value in net.state_dict().items()}
        self._fc, self._hidden_norm, self._norm, self._head = (
            tensors[f"{name}.weight"].to(self._device, self._dtype)
            for name in ("fc", "midlayer.hidden_norm", "norm", "lm_head")
        )
        products.serve_matrices((self._fc, self._head))
        # Its input_norm is that of the embedding.
        self._layer = loading.fuse_layer(
            net.config, tensors, "midlayer.", self._dtype, self._device
        )
        self._norm_before_residual = net.options.norm_before_residual
        # The tokens of draft ids; None: the draft vocabulary is the target's.
        self._drafted = None if net.t2d.all() else net.token_ids.to(self._device)

    def _true_features(self, hidden: Tensor) -> Tensor:
        return products.linear(hidden, self._fc)

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        assert self._layer.input_norm is not None
        embedded = self._normed(
            functional.embedding(tokens, self._target.embed), self._layer.input_norm
        )
        normed = self._normed(features, self._hidden_norm)
        residual = normed if self._norm_before_residual else features
        inputs = torch.cat((embedded, normed), dim=-1)
        return residual, decoder.project(inputs, self._layer.qkv, self._layer.qkv_bias)

    def _logits(self, features: Tensor) -> Tensor:
        return products.linear(self._normed(features, self._norm), self._head)

    def _token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._drafted is None else self._drafted[draft_ids]

    def _over_tokens(self, logits: Tensor) -> Tensor:
        ids = self._drafted
        return logits if ids is None else over_tokens(logits, ids, self._config.vocab_size)
