"""The SDK's sequences become a batch, and the values of its targets become the SDK's records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import InvalidInput
from paceline.services.policy_trainer.batches.examples import read_examples, write_output
from paceline.v1.tinker_pb2 import TinkerChunk, TinkerDatum, TinkerTensor, TinkerTokens

DTYPES = {"<f4": 1, "<i8": 2, "<i4": 3}


def tensor(values: Any, dtype: str) -> TinkerTensor:
    numbers = np.array(values, dtype)
    return TinkerTensor(dense=numbers.tobytes(), dtype=DTYPES[dtype], shape=numbers.shape)


def datum(*parts: Any, **inputs: TinkerTensor) -> TinkerDatum:
    chunks = [
        TinkerChunk(encoded_text=TinkerTokens(tokens=np.array(part, "<i4").tobytes()))
        for part in parts
    ]
    return TinkerDatum(model_input=chunks, loss_fn_inputs=inputs)


def test_chunks_join_and_several_targets_of_a_token_stand_together() -> None:
    first = datum([5], [6], target_tokens=tensor([[6, 1], [7, 2]], "<i8"))
    second = datum([8], target_tokens=tensor([9], "<i4"), weights=tensor([2], "<i8"))
    batch, inputs = read_examples([first, second], ["weights"], vocabulary=10)
    assert batch.token_ids.tolist() == [5, 6, 0, 8, 0]
    assert batch.trained.tolist() == [1, 1, 2, 2, 4]
    assert batch.targets.tolist() == [6, 1, 7, 2, 9]
    assert inputs["weights"].tolist() == [1, 1, 1, 1, 2]


def test_a_record_has_the_shape_of_its_targets() -> None:
    data = [
        datum([5, 6], target_tokens=tensor([[6, 1], [7, 2]], "<i8")),
        datum([8], target_tokens=tensor([9], "<i8")),
    ]
    output = write_output(data, torch.tensor([0, 0, 0, 0, 1]), {"logprobs": torch.arange(5.0)})
    first, second = (record.fields["logprobs"] for record in output.loss_fn_outputs)
    assert np.frombuffer(first.data, "<f4").tolist() == [0, 1, 2, 3]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 16]
    assert list(first.trailing_shape) == [2]
    assert np.frombuffer(second.data, "<f4").tolist() == [4]
    assert list(second.trailing_shape) == []


PLAIN = tensor([6], "<i8")
SPARSE = TinkerTensor(sparse_csr=b"x", dtype=1)
HALF = TinkerTensor(dense=b"123456", dtype=3)
IMAGE = TinkerDatum(model_input=[TinkerChunk(image=b"x")], loss_fn_inputs={"target_tokens": PLAIN})


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (IMAGE, r"data\[0\]: model_input has a chunk"),
        (datum([5]), "target_tokens are missing"),
        (datum([5], target_tokens=HALF), "target_tokens ends within a number"),
        (datum([5], target_tokens=PLAIN, weights=SPARSE), "weights has another form"),
        (datum([5], target_tokens=tensor([1 << 40], "<i8")), "not in the vocabulary"),
        (datum([5], target_tokens=tensor([np.nan], "<f4")), "not in the vocabulary"),
    ],
)
def test_unserved_sequences_are_refused(one: TinkerDatum, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_examples([one], ["weights"], vocabulary=10)
