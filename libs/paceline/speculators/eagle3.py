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
from torch import Tensor, nn

from paceline.config import Config
from paceline.errors import InvalidInput
from paceline.models import decoder, products
from paceline.models.config import ModelConfig, parse_config
from paceline.speculators import chain_net, kinds, layer_drafter, layer_net, vocabulary

KIND = kinds.SPECULATORS["eagle3"]
(ARCHITECTURE,) = KIND.architectures

_VARIANTS = (
    *("bias", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
)
"""Switches of networks with other tensors or another recurrence; the published one has none."""


class Eagle3Options(chain_net.ChainOptions):
    """Settings of an EAGLE-3 drafter."""

    inner_layers: tuple[int, ...] = ()
    """Three decoder layers of the target whose inputs are read; none: 2, L/2 and L-3."""
    norm_before_residual: bool = False
    """The layer's residual is the normed state; SGLang knows false only."""


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

    def forward(self, embedded: Tensor, hidden: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """embedded, hidden [B, T, H] -> [B, T, H]."""
        normed = self.hidden_norm(hidden)
        fused = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(fused, *sight)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Net(chain_net.ChainNet):
    """The drafter's network: see DraftNet.

    Sharded as one part, since every step of a chain runs all of it.
    """

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = Eagle3Options

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
        self.chain_steps = self.options.ttt_steps
        hidden = config.hidden_size
        self.fc = products.Linear(kinds.INNER_STATES * hidden, hidden, bias=False)
        self.midlayer = Eagle3Layer(config, self.options.norm_before_residual)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = products.Linear(hidden, draft_vocab_size or config.vocab_size, bias=False)
        self.limit(torch.arange(draft_vocab_size or config.vocab_size))
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
            message = "target_hidden_size differs"
            raise InvalidInput(message, seen=raw["target_hidden_size"], allowed=target.hidden_size)

        size = raw.get("draft_vocab_size")
        if type(size) is not int or not 0 < size <= target.vocab_size:
            allowed = f"1 to {target.vocab_size}: the rows of its own lm_head"
            message = "draft_vocab_size"
            raise InvalidInput(message, seen="(none)" if size is None else size, allowed=allowed)

        config = parse_config({**raw, "architectures": ["LlamaForCausalLM"]})
        config = replace(config, max_position_embeddings=target.max_position_embeddings)
        inner = layer_net.inner_of(raw, KIND, target, "eagle_aux_hidden_state_layer_ids")
        before = {"norm_before_residual": bool(raw.get("norm_before_residual", False))}
        return cls(config, inner, options.model_copy(update=before), draft_vocab_size=size)

    @torch.no_grad()
    def choose_tokens(self, counts: Tensor) -> None:
        """See LayerNet.choose_tokens; its own head keeps their rows. The choice is final, since
        engines read an EAGLE-3 vocabulary at their start only. Raises InvalidInput for another one.
        """
        vocab_size = self.config.vocab_size
        if len(self.d2t) != vocab_size or len(counts) != vocab_size:
            seen = f"{len(self.d2t)} tokens, counts of {len(counts)}"
            message = "a draft vocabulary is chosen once, of all tokens"
            raise InvalidInput(message, seen=seen, allowed=vocab_size)
        size = vocabulary.draft_size(self.options.draft_vocab_size, vocab_size)
        chosen = vocabulary.frequent_tokens(counts, size).to(self.d2t.device)
        self.limit(chosen)
        head = products.Linear(self.config.hidden_size, size, bias=False).to(self.lm_head.weight)
        head.weight.copy_(self.lm_head.weight[chosen])
        self.lm_head = head

    def follow_tokens(self, counts: Tensor) -> None:
        """No effect: see choose_tokens."""

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

    def fused(self, states: Tensor) -> Tensor:
        """See ChainNet.fused."""
        fused: Tensor = self.fc(states)
        return fused

    def step(self, embedded: Tensor, features: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """See ChainNet.step; the output before the final norm."""
        return self.midlayer(embedded, features, *sight)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [..., Vd] by draft id, of features [..., H]."""
        return self.lm_head(self.norm(features))


class Eagle3Drafter(layer_drafter.LayerDrafter[Eagle3Net]):
    """The speculator "eagle3"."""

    net = Eagle3Net

    def _fuse(self, net: Eagle3Net, tensors: Mapping[str, Tensor]) -> None:
        self._fc, self._hidden_norm, self._norm, self._head = (
            tensors[f"{name}.weight"].to(self._device, self._dtype)
            for name in ("fc", "midlayer.hidden_norm", "norm", "lm_head")
        )
        # Its input_norm is that of the embedding.
        self._layer = self._fused_layer(tensors, "midlayer.")
        self._use_fast_products((self._layer,), self._fc, self._head)
        self._norm_before_residual = net.options.norm_before_residual

    def _true_features(self, hidden: Tensor) -> Tensor:
        return products.linear(hidden, self._fc)

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        assert self._layer.input_norm is not None
        embedded = self._normed(self._embedded(tokens), self._layer.input_norm)
        normed = self._normed(features, self._hidden_norm)
        residual = normed if self._norm_before_residual else features
        inputs = torch.cat((embedded, normed), dim=-1)
        return residual, decoder.project(inputs, self._layer.qkv, self._layer.qkv_bias)

    def _logits(self, features: Tensor) -> Tensor:
        return products.linear(self._normed(features, self._norm), self._head)
