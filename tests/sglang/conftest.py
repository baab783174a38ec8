"""The model that tests compare SGLang with."""

import pytest
from sglang_served import DEMO, load_oracle
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    """The demo's trained policy in transformers."""
    return load_oracle(DEMO / "policy_trained")
