"""Predicts the next feature with one decoder layer: EAGLE-1 (Li et al. 2024, arXiv 2401.15077).

Engine and trainer share the network. embed_tokens and lm_head are the target's by reference, and
never trained or exported.

Alignment: row t = (hidden h_t, embed(token t + 1)), embed first in the concatenation, rotary
position t. Its output predicts h_{t+1}, and lm_head of the output predicts token t + 2. h is the
target's last hidden state after the final norm.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput
from paceline.models import decoder, loading, products
from paceline.models.config import ARCHITECTURES as TARGETS
from paceline.models.config import ModelConfig, architecture, parse_config
from paceline.speculators import kinds, layer_drafter, layer_net, losses, packed
from paceline.speculators.net import Objective

KIND = kinds.SPECULATORS["eagle"]
ARCHITECTURES = dict(zip(TARGETS.values(), KIND.architectures, strict=True))
"""Family of the target -> architecture of its drafter."""


class EagleOptions(Config):
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
        self.post_attention_layernorm = layer_net.RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        chain: layer_net.ChainKeys | None,
    ) -> Tensor:
        """x [B, T, H] -> same shape; see layer_net.py, Attention.forward, for the rest."""
        x = x + self.self_attn(x, cos, sin, mask, chain)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleNet(layer_net.LayerNet):
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
        self.reset(seed)

    @classmethod
    def fresh(cls, target: ModelConfig, options: EagleOptions, seed: int) -> Self:
        """See DraftNet.fresh."""
        return cls(target, options, seed=seed)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: EagleOptions) -> Self:
        """See DraftNet.parse; `fc_bias` is the checkpoint's, and its layer may differ from the
        target's in heads and widths.
        """
        name, allowed = architecture(raw), ARCHITECTURES[target.family]
        if name != allowed:
            raise InvalidInput(
                "architectures is not the drafter of the target's family",
                seen=name,
                allowed=allowed,
            )
        layer_net.check_one_layer(raw, target)
        options = options.model_copy(update={"fc_bias": bool(raw.get("fc_bias", False))})
        like = next(name for name, family in TARGETS.items() if family == target.family)
        return cls(parse_config({**raw, "architectures": [like]}), options)

    def twin(self) -> Self:
        """See DraftNet.twin."""
        return type(self)(self.config, self.options)

    def shards(self) -> tuple[nn.Module, ...]:
        """See DraftNet.shards."""
        return (self.layers[0],)

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        described = layer_net.layer_config_json(self.config, ARCHITECTURES[self.config.family])
        return described | {"fc_bias": self.options.fc_bias}

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """New weights: fc near "the next state equals this one", all other matrices normal(0,
        0.02).
        """
        layer_net.reset_weights(self, seed)
        self.fc.weight[:, self.config.hidden_size :] += torch.eye(self.config.hidden_size)

    def forward(self, row: packed.PackedRow) -> Objective:
        """See DraftNet.forward and losses.eagle_loss."""
        features = self.features(
            self._last(row), row.next_tokens[None], row.positions[None], row.mask()[None]
        )
        return losses.eagle_loss(
            features[0],
            row.next_states,
            self.head,
            row.valid,
            feature_weight=self.options.feature_weight,
            token_weight=self.options.token_weight,
        )

    def chain_states(
        self, row: packed.PackedRow, steps: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """See DraftNet.chain_states."""
        chain = chain_features(
            self,
            self._last(row),
            row.next_tokens[None],
            row.positions[None],
            steps,
            row.mask()[None],
        )
        for step, features in enumerate(chain):
            yield step, slice(0, len(row)), features[0]

    def _last(self, row: packed.PackedRow) -> Tensor:
        """The last hidden state [1, T, H] of captured rows."""
        return row.states[None, :, -self.config.hidden_size :]

    def features(
        self,
        hidden: Tensor,
        next_tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        chain: layer_net.ChainKeys | None = None,
    ) -> Tensor:
        """Predicted features: row t predicts h_{t+1}.

        hidden [B, T, H]: h_t; next_tokens int64 [B, T]: token t + 1; positions int64 [B, T]: t
        within its document; mask bool [B, T, T] (True where row i may see row j) or None for
        causal; chain: see chain_features. Returns [B, T, H].
        """
        embedded = functional.embedding(next_tokens, self.embed).to(hidden.dtype)
        x = self.fc(torch.cat((embedded, hidden), dim=-1))
        seen = None if mask is None else mask[:, None]
        return self.layers[0](x, *layer_net.rotary_angles(self.config, positions), seen, chain)

    def logits(self, features: Tensor) -> Tensor:
        """lm_head of features [..., H] -> [..., V]."""
        return products.linear(features, self.head.to(features.dtype))


def chain_features(
    net: EagleNet,
    hidden: Tensor,
    next_tokens: Tensor,
    positions: Tensor,
    steps: int,
    mask: Tensor | None = None,
) -> Iterator[Tensor]:
    """Features of a draft chain from every row, teacher-forced on the true tokens (EAGLE-3's
    training-time test).

    Step 0 is net(hidden, ...). Step i reads the features of step i - 1 and token t + 1 + i at
    position t + i. It sees the same as the engine's drafter: true states of rows <= t and its own
    earlier steps. lm_head of step i predicts token t + 2 + i. While all earlier drafts equal the
    true tokens, this is exactly the engine's chain. net is an EagleNet, sharded or not; arguments
    as in its forward. Yields `steps` tensors [B, T, H]. The last i rows of step i have no true
    token (id 0 instead) and no meaning.
    """
    chain = layer_net.ChainKeys()
    features, tokens = hidden, next_tokens
    for step in range(steps):
        features = net.features(features, tokens, positions + step, mask, chain)
        yield features
        tokens = functional.pad(tokens[:, 1:], (0, 1))


class EagleDrafter(layer_drafter.LayerDrafter[EagleNet]):
    """The speculator "eagle"."""

    net = EagleNet

    def _fuse(self, net: EagleNet) -> None:
        device, hidden = self._device, self._config.hidden_size
        tensors = {name: value.detach() for name, value in net.state_dict().items()}
        fc = tensors["fc.weight"].to(device, self._dtype)
        bias = net.fc.bias.detach().to(device, self._dtype) if net.fc.bias is not None else None
        self._layer = loading.fuse_layer(net.config, tensors, "layers.0.", self._dtype, device)
        # The half of fc that reads the state, and its other half applied to every embedding.
        self._fc_hidden = fc[:, hidden:].contiguous()
        self._token_table = products.linear(self._target.embed, fc[:, :hidden], bias)

    def _true_features(self, hidden: Tensor) -> Tensor:
        return hidden

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = products.added(self._token_table.index_select(0, tokens), features, self._fc_hidden)
        return x, decoder.project_inputs(self._layer, x, self._config.rms_norm_eps)

    def _logits(self, features: Tensor) -> Tensor:
        return products.linear(features, self._target.head)
