"""Predicts tokens with a cell of one matrix, norm and GELU: MLPSpeculator of IBM (Wertheimer et al.
2024, arXiv 2404.19124).

Names and config.json of the checkpoint are from vLLM's "mlp_speculator"; recurrent.py describes the
parts outside the cell. Draft i of n, with D the width: h = GELU(ln_i(proj_i(h) + (ew / sw)
emb_i(token))), logits = head_i(h), where sw = 0.5^(0.5 / n) and ew = sqrt((1 - sw²) D / 2).
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.config import Config
from paceline.models import config, products
from paceline.speculators import kinds, recurrent
from paceline.speculators.net import check_fit

KIND = kinds.SPECULATORS["mlp"]
(ARCHITECTURE,) = KIND.architectures


class MlpNet(recurrent.RecurrentNet):
    """The drafter's network: see DraftNet."""

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = recurrent.RecurrentOptions
    options: recurrent.RecurrentOptions

    def __init__(self, target: config.ModelConfig, options: recurrent.RecurrentOptions) -> None:
        super().__init__(target, options)
        # The loaders tie no tensors if there is only one draft.
        self.tied = options.tie_weights and options.n_predict > 1
        drafts = options.n_predict
        inputs = [target.hidden_size, *[self.width] * ((2 if self.tied else drafts) - 1)]
        apart = range(1 if self.tied else drafts)
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, self.width) for _ in apart)
        self.proj = nn.ModuleList(products.Linear(size, self.width, bias=False) for size in inputs)
        self.ln = nn.ModuleList(recurrent.BiasedNorm(self.width) for _ in apart)
        self.add_heads(len(apart))

    def spread(self, parameter: Tensor) -> float:
        """See RecurrentNet.spread: 1 / sqrt(D)."""
        return 1 / math.sqrt(self.width)

    def step_weights(self) -> list[recurrent.StepWeights]:
        """See RecurrentNet.step_weights."""
        last = len(self.proj) - 1
        return [
            recurrent.StepWeights(
                self.get_parameter(f"proj.{min(step, last)}.weight"),
                (self.get_parameter(f"emb.{own}.weight"),),
                (self.norm_pair(f"ln.{own}"),),
                self.get_parameter(f"head.{own}.weight"),
            )
            for step in range(self.options.n_predict)
            for own in (0 if self.tied else step,)
        ]

    @classmethod
    def read_shape(cls, raw: Mapping[str, Any], target: config.ModelConfig) -> dict[str, Any]:
        """See RecurrentNet.read_shape."""
        check_fit(raw, {"vocab_size": target.vocab_size, "emb_dim": target.hidden_size})
        return {
            "n_predict": config.read_count(raw, "n_predict"),
            "inner_dim": config.read_count(raw, "inner_dim", least=0),
            "tie_weights": config.read_flag(raw, "tie_weights"),
            "scale_input": config.read_flag(raw, "scale_input"),
        }

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        return super().config_json() | {
            "emb_dim": self.target.hidden_size,
            "inner_dim": self.width,
            "tie_weights": self.tied,
        }

    def aliases(self) -> dict[str, str]:
        """See RecurrentNet.aliases."""
        if not self.tied:
            return {}
        later = range(1, self.options.n_predict)
        parts = ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight")
        tied = {part.format(step): part.format(0) for part in parts for step in later}
        return tied | {f"proj.{step}.weight": "proj.1.weight" for step in later[1:]}


class MlpDrafter(recurrent.RecurrentDrafter):
    """The speculator "mlp"."""

    net = MlpNet
