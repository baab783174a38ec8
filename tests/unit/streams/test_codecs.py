"""Entries round trip bit for bit; anything else raises DataLoss and nothing but DataLoss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trajectories import COUNTS, WORDS, trajectories

from paceline.errors import DataLoss, InvalidInput
from paceline.streams import (
    FeatureBatch,
    decode_features,
    decode_trajectory,
    encode_features,
    encode_trajectory,
    trajectory_key,
)
from paceline.streams.entries import (
    FEATURE_ARRAYS,
    FEATURE_HEADER,
    TRAJECTORY_HEADER,
    TRAJECTORY_TENSORS,
)
from paceline.tensors import NamedTensor, as_numpy, decode_safetensors
from paceline.trajectory import BranchKey, DrawSpan, Trajectory, VersionSpan

PAGE = Path(__file__).parents[3] / "docs/streams.md"


@st.composite
def features(draw: st.DrawFn) -> FeatureBatch:
    rows, size = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(["BF16", "F32"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return FeatureBatch(
        run_id=draw(WORDS),
        step=draw(COUNTS),
        session_id=draw(WORDS),
        policy_version=draw(COUNTS),
        lm_head_hash=draw(WORDS),
        hidden=NamedTensor(
            "hidden",
            dtype,
            (rows, size),
            generator.bytes(rows * size * (2 if dtype == "BF16" else 4)),
        ),
        token_ids=generator.integers(0, 2**31 - 1, rows + 1, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        mask=generator.integers(0, 2, rows, dtype=np.uint8),
        versions=generator.integers(0, 2**62, rows, dtype=np.int64),
        layers="1,3",
        convention="pre_norm",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


def _batch() -> FeatureBatch:
    return FeatureBatch(
        "run",
        1,
        "s",
        2,
        "abcd",
        NamedTensor("hidden", "BF16", (2, 3), bytes(range(12))),
        np.array([7, 8, 9], np.int32),
        np.array([0, 1], np.int32),
        np.array([0, 1], np.uint8),
        np.array([2, 2]),
    )


def _trajectory() -> Trajectory:
    return Trajectory(
        BranchKey("run", "s"),
        1,
        "t",
        "g",
        2,
        0,
        1,
        (1, 2),
        (0, 1),
        (0.0, -1.5),
        (VersionSpan(1, 2, 3),),
        0.5,
        9,
        1.0,
    )


@given(trajectories())
@settings(max_examples=case_count(60), deadline=None)
def test_a_trajectory_comes_back_as_it_was(trajectory: Trajectory) -> None:
    header, payload = encode_trajectory(trajectory)
    assert decode_trajectory(header, payload) == trajectory
    assert trajectory_key(header) == str(trajectory.key)


@given(features())
@settings(max_examples=case_count(60), deadline=None)
def test_a_feature_batch_comes_back_with_every_field(batch: FeatureBatch) -> None:
    back = decode_features(*encode_features(batch))
    for one in fields(FeatureBatch):
        assert same(getattr(back, one.name), getattr(batch, one.name)), one.name


def same(one: Any, other: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(one, NamedTensor):
        return (one.dtype, one.shape, bytes(one.view)) == (
            other.dtype,
            other.shape,
            bytes(other.view),
        )
    return np.array_equal(one, other)


@pytest.mark.parametrize(
    ("stream", "entry", "header", "tensors"),
    [
        (
            "trajectories",
            lambda: encode_trajectory(_trajectory()),
            [*TRAJECTORY_HEADER, "ways", "crc32"],
            [*TRAJECTORY_TENSORS],
        ),
        (
            "features",
            lambda: encode_features(_batch()),
            [*FEATURE_HEADER],
            [*list(FEATURE_ARRAYS)[:3], "hidden", *list(FEATURE_ARRAYS)[3:]],
        ),
    ],
)
def test_an_entry_is_what_its_page_describes(
    stream: str,
    entry: Callable[[], tuple[dict[str, str], bytes]],
    header: list[str],
    tensors: list[str],
) -> None:
    fields, payload = entry()
    assert list(fields) == ["schema_version", "header", "traceparent"]
    assert list(json.loads(fields["header"])) == header
    assert list(decode_safetensors(payload)) == tensors
    page = PAGE.read_text().partition(f"## {stream}")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*header, *tensors]


def test_decoded_rows_are_views_of_the_payload() -> None:
    header, payload = encode_features(_batch())
    rows = as_numpy(decode_features(header, payload).hidden)
    assert np.shares_memory(rows, np.frombuffer(payload, np.uint8))


def test_a_missing_reward_is_not_zero() -> None:
    with_zero = Trajectory(BranchKey("r", "s"), 0, "t", "g", 1, 0, 0, (), (), (), (), 0.0, 0, 1.0)
    without = Trajectory(BranchKey("r", "s"), 0, "t", "g", 1, 0, 0, (), (), (), (), None, 0, 1.0)
    assert decode_trajectory(*encode_trajectory(with_zero)).reward == 0.0
    assert decode_trajectory(*encode_trajectory(without)).reward is None


def changed(entry: dict[str, str], **values: object) -> dict[str, str]:
    """The entry with other values in its header; None removes one."""
    header = {**json.loads(entry["header"]), **values}
    kept = {name: value for name, value in header.items() if value is not None}
    return {**entry, "header": json.dumps(kept)}


@pytest.mark.parametrize("count", [0, -1, "2", 1.5])
def test_a_branch_that_its_session_does_not_count_is_data_loss(count: object) -> None:
    entry, payload = encode_trajectory(_trajectory())
    assert decode_trajectory(changed(entry, branch_count=2), payload).branch_count == 2
    with pytest.raises(DataLoss):
        decode_trajectory(changed(entry, branch_count=count), payload)


@given(st.data())
@settings(max_examples=case_count(150), deadline=None)
def test_a_damaged_trajectory_payload_is_data_loss(data: st.DataObject) -> None:
    header, payload = encode_trajectory(_trajectory())
    with pytest.raises(DataLoss):
        decode_trajectory(header, data.draw(_damaged(payload)))


@given(st.data())
@settings(max_examples=case_count(150), deadline=None)
def test_a_damaged_feature_payload_is_data_loss_or_other_numbers(data: st.DataObject) -> None:
    header, payload = encode_features(_batch())
    with suppress(DataLoss):
        decode_features(header, data.draw(_damaged(payload)))


@given(st.integers(0, 10_000))
@settings(max_examples=case_count(60), deadline=None)
def test_a_cut_feature_payload_is_data_loss(cut: int) -> None:
    header, payload = encode_features(_batch())
    with pytest.raises(DataLoss):
        decode_features(header, payload[: cut % len(payload)])


@given(st.data())
@settings(max_examples=case_count(150), deadline=None)
def test_a_damaged_field_is_data_loss_or_another_value(data: st.DataObject) -> None:
    for encode, decode, subject in (
        (encode_trajectory, decode_trajectory, _trajectory()),
        (encode_features, decode_features, _batch()),
    ):
        header, payload = encode(subject)  # type: ignore[operator]
        name = data.draw(st.sampled_from(sorted(header)))
        changed = data.draw(
            st.none()
            | st.text(max_size=6)
            | st.sampled_from(["-1", "1e400", "9" * 400, "nan", "٣"])
        )
        damaged = {key: value for key, value in header.items() if key != name}
        if changed is not None:
            damaged[name] = changed
        with suppress(DataLoss):
            decode(damaged, payload)


@pytest.mark.parametrize("name", [*TRAJECTORY_HEADER, "ways", "crc32"])
def test_a_missing_field_is_data_loss(name: str) -> None:
    entry, payload = encode_trajectory(_trajectory())
    with pytest.raises(DataLoss):
        decode_trajectory(changed(entry, **{name: None}), payload)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "9" * 400),
        ("step", 1.5),
        ("key", []),
        ("ways", 3),
        ("ways", {"ab": 1}),
        ("ways", [["off", "float32"]]),
        ("ways", [["off", 1, False, False]]),
        ("ways", [["off", "float32", 0, False]]),
    ],
)
def test_a_field_of_another_type_is_data_loss(name: str, value: object) -> None:
    drawn = replace(_trajectory(), draw_spans=(DrawSpan(1, 2, "off", "float32"),))
    entry, payload = encode_trajectory(drawn)
    assert decode_trajectory(entry, payload) == drawn
    with pytest.raises(DataLoss):
        decode_trajectory(changed(entry, **{name: value}), payload)


def test_another_layout_is_refused_by_name() -> None:
    header, payload = encode_trajectory(_trajectory())
    with pytest.raises(DataLoss, match="seen: 1; allowed: 6"):
        decode_trajectory({**header, "schema_version": "1"}, payload)


def test_rows_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(InvalidInput, match="do not fit"):
        FeatureBatch(
            "run",
            1,
            "s",
            2,
            "abcd",
            NamedTensor("hidden", "F32", (2, 1), bytes(8)),
            np.zeros(2, np.int32),
            np.zeros(2, np.int32),
            np.zeros(2, np.uint8),
            np.zeros(2, np.int64),
        )


@st.composite
def _damaged(draw: st.DrawFn, payload: bytes) -> bytes:
    at = draw(st.integers(0, len(payload) - 1))
    if draw(st.booleans()):
        return payload[:at] + draw(
            st.binary(max_size=8).filter(lambda extra: extra != payload[at:])
        )
    return payload[:at] + bytes([payload[at] ^ draw(st.integers(1, 255))]) + payload[at + 1 :]
