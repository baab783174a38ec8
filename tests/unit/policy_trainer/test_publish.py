"""What a restarted trainer takes of the weights that serve."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import DataLoss
from policy_trainer.publish import Publication, make_publication, merged

EMBEDDING = "model.embed_tokens.weight"


def published(weights: dict[str, torch.Tensor], dtype: str) -> Publication:
    return make_publication(1, weights, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_published_as_those_that_serve_and_else_their_own(dtype: str) -> None:
    draw = torch.Generator().manual_seed(1)
    served = {EMBEDDING: torch.randn(64, 8, generator=draw), "b": torch.tensor([0.0, 1.0])}
    own = {name: tensor.clone() for name, tensor in served.items()}
    own[EMBEDDING][3] *= 1.25
    own["b"][0] = -0.0  # equal, but other bits
    there = published(served, dtype)
    taken = merged(own, there.policy)
    assert [bytes(one.view) for one in published(taken, dtype).policy] == [
        bytes(one.view) for one in there.policy
    ]
    kept = torch.ones(64, dtype=torch.bool)
    kept[3] = False
    assert torch.equal(taken[EMBEDDING][kept], own[EMBEDDING][kept]), "lost its fp32 numbers"


def test_weights_of_another_model_are_not_taken() -> None:
    served = published({EMBEDDING: torch.zeros(4, 2)}, "float32")
    with pytest.raises(DataLoss, match="another model serves"):
        merged({EMBEDDING: torch.zeros(4, 3)}, served.policy)
