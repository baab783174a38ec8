"""Predicts the next feature with one decoder layer: EAGLE-1 (Li et al. 2024, arXiv 2401.15077).

Engine and trainer share the network. embed_tokens and lm_head are the target's by reference, and
never trained or exported.

Alignment: row t = (hidden h_t, embed(token t + 1)), embed first in the concatenation, rotary
position t. Its output predicts h_{t+1}, and lm_head of the output predicts token t + 2. h is the
target's last hidden state after the final norm.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.models import decoder, products
from paceline.models.config import ARCHITECTURES as TARGETS
from paceline.models.config import ModelConfig, parse_config
from paceline.speculators import chain_net, kinds, layer_drafter, layer_net, net, vocabulary

KIND = kinds.SPECULATORS["eagle"]
ARCHITECTURES = dict(zip(TARGETS.values(), KIND.architectures, strict=True))
"""Family of the target -> architecture of its drafter."""


class EagleOptions(chain_net.ChainOptions):
    """Settings of an EAGLE drafter."""

    fc_bias: bool = False
    """A bias behind the fusion of embedding and state."""
    norms: bool = False
    """RMSNorms of the embedding, the state and the layer's input. EAGLE-1 has none, and other
    engines load none.
    """
    ttt_steps: int = Field(default=0, ge=0, le=7)
    """Steps of a draft chain that are trained; 0: 3 with norms, else 1."""
    feature_weight: float = Field(default=1.0, ge=0)
    """Weight of SmoothL1 on features."""
    token_weight: float | None = Field(default=None, ge=0)
    """Weight of the soft cross-entropy on tokens; none: 1 with norms, else 0.1."""


class EagleLayer(nn.Module):
    """One decoder layer of the target's family, with input_layernorm if the net has norms; FSDP2
    may shard it.
    """

    def __init__(self, config: ModelConfig, norms: bool) -> None:
        super().__init__()
        self.input_layernorm = _norm(config, norms)
        self.self_attn = layer_net.Attention(config, config.hidden_size)
        self.mlp = layer_net.SwiGlu(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """x [B, T, H] -> same shape."""
        x = x + self.self_attn(self.input_layernorm(x), *sight)
        return x + self.mlp(self.post_attention_layernorm(x))


def _norm(config: ModelConfig, norms: bool) -> nn.Module:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if norms else nn.Identity()


class EagleNet(chain_net.ChainNet):
    """The drafter's network: see DraftNet."""

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = EagleOptions

    def __init__(
        self, config: ModelConfig, options: EagleOptions | None = None, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.options = options or EagleOptions()
        norms, weight = self.options.norms, self.options.token_weight
        self.chain_steps = self.options.ttt_steps or (3 if norms else 1)
        self.token_weight = (1.0 if norms else 0.1) if weight is None else weight
        self.fc = products.Linear(
            2 * config.hidden_size, config.hidden_size, bias=self.options.fc_bias
        )
        self.embed_norm, self.state_norm = _norm(config, norms), _norm(config, norms)
        self.layers = nn.ModuleList([EagleLayer(config, norms)])
        # fc is near "the next state equals this one".
        layer_net.reset_weights(self, seed)
        if not norms:
            with torch.no_grad():
                self.fc.weight[:, config.hidden_size :] += torch.eye(config.hidden_size)

    @classmethod
    def fresh(cls, target: ModelConfig, options: EagleOptions, seed: int) -> Self:
        """See DraftNet.fresh."""
        return vocabulary.with_tokens(cls(target, options, seed=seed), target)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: EagleOptions) -> Self:
        """See DraftNet.parse; `fc_bias` and `norms` are the checkpoint's, and its layer may differ
        from the target's in heads and widths.
        """
        net.check_fit(raw, {"architectures": [ARCHITECTURES[target.family]]})
        layer_net.check_one_layer(raw, target)
        own = {name: bool(raw.get(name, False)) for name in ("fc_bias", "norms")}
        options = options.model_copy(update=own)
        like = next(name for name, family in TARGETS.items() if family == target.family)
        return vocabulary.of_size(cls(parse_config({**raw, "architectures": [like]}), options), raw)

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        described = layer_net.layer_config_json(self.config, ARCHITECTURES[self.config.family])
        described |= {"norms": True} if self.options.norms else {}
        return described | {"fc_bias": self.options.fc_bias} | self.vocabulary_json()

    def regression(self, features: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See ChainNet.regression: EAGLE-1 has mean_H SmoothL1 (Li et al. 2024, section 3.3)."""
        losses = functional.smooth_l1_loss(features, states, reduction="none").mean(dim=-1)
        feature = losses.sum()
        return self.options.feature_weight * feature, {"feature": feature.detach()}

    def fused(self, states: Tensor) -> Tensor:
        """See ChainNet.fused: the last hidden states as they are."""
        return states

    def step(self, embedded: Tensor, features: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """See ChainNet.step: row t predicts h_{t+1}; with norms, from h_t plus fc's output."""
        entering = (self.embed_norm(embedded), self.state_norm(features))
        fused: Tensor = self.fc(torch.cat(entering, dim=-1).to(features.dtype))
        return self.layers[0](fused + features if self.options.norms else fused, *sight)


class EagleDrafter(layer_drafter.LayerDrafter[EagleNet]):
    """The speculator "eagle"."""

    net = EagleNet

    def _fuse(self, net: EagleNet, tensors: Mapping[str, Tensor]) -> None:
        self._layer = self._fused_layer(tensors, "layers.0.")
        self._fc = tensors["fc.weight"].to(self._device, self._dtype)
        self._bias, self._embed_norm, self._state_norm = (
            None if (one := tensors.get(name)) is None else one.to(self._device, self._dtype)
            for name in ("fc.bias", "embed_norm.weight", "state_norm.weight")
        )
        self._use_fast_products((self._layer,), self._fc)

    def _true_features(self, hidden: Tensor) -> Tensor:
        return hidden

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded, states = self._embedded(tokens), features
        if self._embed_norm is not None and self._state_norm is not None:
            embedded = self._normed(embedded, self._embed_norm)
            states = self._normed(states, self._state_norm)
        x = products.linear(torch.cat((embedded, states), dim=-1), self._fc, self._bias)
        x = x if self._state_norm is None else x + features
        return x, decoder.project_inputs(self._layer, x, self._config.rms_norm_eps)

    def _logits(self, features: Tensor) -> Tensor:
        return products.linear(features, self._head)
