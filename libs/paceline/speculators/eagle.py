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
from paceline.speculators import kinds, layer_drafter, layer_net, net, packed, vocabulary

KIND = kinds.SPECULATORS["eagle"]
ARCHITECTURES = dict(zip(TARGETS.values(), KIND.architectures, strict=True))
"""Family of the target -> architecture of its drafter."""


class EagleOptions(vocabulary.LimitedOptions):
    """Settings of an EAGLE drafter."""

    fc_bias: bool = False
    """A bias behind the fusion of embedding and state."""
    feature_weight: float = Field(default=1.0, ge=0)
    """Weight of SmoothL1 on features."""
    token_weight: float = Field(default=0.1, ge=0)
    """Weight of the soft cross-entropy on tokens."""


class EagleLayer(nn.Module):
    """One decoder layer of the target's family without input_layernorm; FSDP2 may shard it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = layer_net.Attention(config, config.hidden_size)
        self.mlp = layer_net.SwiGlu(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """x [B, T, H] -> same shape."""
        x = x + self.self_attn(x, *sight)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleNet(layer_net.ChainNet):
    """The drafter's network: see DraftNet."""

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = EagleOptions

    def __init__(
        self, config: ModelConfig, options: EagleOptions | None = None, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.options = options or EagleOptions()
        self.fc = products.Linear(
            2 * config.hidden_size, config.hidden_size, bias=self.options.fc_bias
        )
        self.layers = nn.ModuleList([EagleLayer(config)])
        # fc is near "the next state equals this one".
        layer_net.reset_weights(self, seed)
        with torch.no_grad():
            self.fc.weight[:, config.hidden_size :] += torch.eye(config.hidden_size)

    @classmethod
    def fresh(cls, target: ModelConfig, options: EagleOptions, seed: int) -> Self:
        """See DraftNet.fresh."""
        return vocabulary.with_tokens(cls(target, options, seed=seed), target)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: EagleOptions) -> Self:
        """See DraftNet.parse; `fc_bias` is the checkpoint's, and its layer may differ from the
        target's in heads and widths.
        """
        net.check_fit(raw, {"architectures": [ARCHITECTURES[target.family]]})
        layer_net.check_one_layer(raw, target)
        options = options.model_copy(update={"fc_bias": bool(raw.get("fc_bias", False))})
        like = next(name for name, family in TARGETS.items() if family == target.family)
        return vocabulary.of_size(cls(parse_config({**raw, "architectures": [like]}), options), raw)

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        described = layer_net.layer_config_json(self.config, ARCHITECTURES[self.config.family])
        return described | {"fc_bias": self.options.fc_bias} | self.vocabulary_json()

    def forward(self, row: packed.PackedRow) -> net.Objective:
        """See DraftNet.forward: EAGLE-1's objective (Li et al. 2024, section 3.3).

        loss_t = feature_weight * mean_H SmoothL1(f_t - h_{t+1}) + token_weight * net.soft_losses

        of outputs f_t at valid positions. Tokens are taught where the likeliest one is draftable.
        """
        features, _, _ = next(self.unroll(row, 1))
        return self.objective(features, row)

    def objective(self, features: Tensor, row: packed.PackedRow) -> net.Objective:
        """The loss of outputs [T, H] for a row, see forward."""
        row, options = row.taught(self.head), self.options
        predicted, wanted = features[row.valid], row.next_states[row.valid]
        feature = functional.smooth_l1_loss(predicted, wanted, reduction="none").mean(dim=-1).sum()
        places = (row.valid & self.draftable(row)).nonzero()[:, 0]
        losses, right, _ = net.soft_losses(
            self.logits(features[places]), row, places, self.draft_ids
        )
        token = losses.sum()
        return net.Objective(
            loss=options.feature_weight * feature + options.token_weight * token,
            positions=row.valid.sum(),
            terms={"feature": feature.detach(), "token": token.detach(), "correct": right.sum()},
        )

    def fused(self, states: Tensor) -> Tensor:
        """See ChainNet.fused: the last hidden states as they are."""
        return states

    def step(self, embedded: Tensor, features: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """See ChainNet.step: row t predicts h_{t+1}."""
        return self.layers[0](self.fc(torch.cat((embedded, features), dim=-1)), *sight)


class EagleDrafter(layer_drafter.LayerDrafter[EagleNet]):
    """The speculator "eagle"."""

    net = EagleNet

    def _fuse(self, net: EagleNet, tensors: Mapping[str, Tensor]) -> None:
        self._layer = self._fused_layer(tensors, "layers.0.")
        self._fc = tensors["fc.weight"].to(self._device, self._dtype)
        bias = tensors.get("fc.bias")
        self._bias = None if bias is None else bias.to(self._device, self._dtype)
        self._use_fast_products((self._layer,), self._fc)

    def _true_features(self, hidden: Tensor) -> Tensor:
        return hidden

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((self._embedded(tokens), features), dim=-1)
        x = products.linear(inputs, self._fc, self._bias)
        return x, decoder.project_inputs(self._layer, x, self._config.rms_norm_eps)

    def _logits(self, features: Tensor) -> Tensor:
        return products.linear(features, self._head)
