"""Entries round trip bit for bit; anything else raises DataLoss and nothing but DataLoss."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataLoss, InvalidInput
from paceline.streams import (
    FeatureBatch,
    RejectedRows,
    decode_features,
    decode_trajectory,
    encode_features,
    encode_trajectory,
    trajectory_key,
)
from paceline.tensors import NamedTensor, as_numpy, decode_safetensors, encode_safetensors
from paceline.trajectory import BranchKey, SpeculationStats, Trajectory, VersionSpan

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=12)
COUNTS = st.integers(0, 2**40)
FLOATS = st.floats(width=32, allow_nan=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 12))

    def row(values: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    spans = draw(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=3))
    return Trajectory(
        key=BranchKey(draw(WORDS), draw(WORDS), draw(WORDS)),
        step=draw(COUNTS),
        task_id=draw(WORDS),
        group_id=draw(WORDS),
        group_size=draw(COUNTS),
        task_index=draw(COUNTS),
        sample_index=draw(COUNTS),
        token_ids=row(st.integers(0, 2**31 - 1)),
        loss_mask=row(st.integers(0, 1)),
        behavior_logprobs=row(FLOATS),
        version_spans=tuple(VersionSpan(*span) for span in spans),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.floats(0, 10)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        speculation=SpeculationStats(*(draw(COUNTS) for _ in range(5))),
        branch_count=draw(st.integers(1, 2**31)),
    )


@st.composite
def features(draw: st.DrawFn) -> FeatureBatch:
    rows, size = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(["BF16", "F32"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    drafts = draw(st.integers(0, 5)) if rows else 0
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
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        rejected=_rejected(drafts, rows, size, dtype, generator) if drafts else None,
    )


def _rejected(
    count: int, rows: int, size: int, dtype: str, generator: np.random.Generator
) -> RejectedRows:
    """Drafts under random rows of the sequence and under each other."""
    positions = list(range(rows))
    parents = []
    for _ in range(count):
        parents.append(int(generator.integers(len(positions))))
        positions.append(positions[parents[-1]] + 1)
    return RejectedRows(
        NamedTensor(
            "rejected_hidden",
            dtype,
            (count, size),
            generator.bytes(count * size * (2 if dtype == "BF16" else 4)),
        ),
        generator.integers(0, 2**31 - 1, count, dtype=np.int32),
        np.array(positions[rows:], np.int32),
        np.array(parents, np.int32),
    )


def _with_drafts(parents: list[int], positions: list[int], **changes: Any) -> FeatureBatch:
    """Two rows of three values and rejected drafts."""
    count = len(parents)
    drafts = {
        "hidden": NamedTensor("rejected_hidden", "BF16", (count, 3), bytes(range(6 * count))),
        "token_ids": np.arange(20, 20 + count, dtype=np.int32),
        "positions": np.array(positions, np.int32),
        "parents": np.array(parents, np.int32),
    }
    return replace(_batch(), rejected=RejectedRows(**{**drafts, **changes}))


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
@settings(max_examples=60, deadline=None)
def test_a_trajectory_comes_back_as_it_was(trajectory: Trajectory) -> None:
    fields, payload = encode_trajectory(trajectory)
    assert decode_trajectory(fields, payload) == trajectory
    assert trajectory_key(fields) == str(trajectory.key)


@given(features())
@settings(max_examples=60, deadline=None)
def test_a_feature_batch_comes_back_as_it_was(batch: FeatureBatch) -> None:
    back = decode_features(*encode_features(batch))
    assert bytes(back.hidden.view) == bytes(batch.hidden.view)
    assert (back.hidden.dtype, back.hidden.shape) == (batch.hidden.dtype, batch.hidden.shape)
    for name in ("token_ids", "positions", "mask", "versions"):
        assert np.array_equal(getattr(back, name), getattr(batch, name)), name
    for name in (
        "run_id",
        "step",
        "session_id",
        "policy_version",
        "lm_head_hash",
        "layers",
        "convention",
    ):
        assert getattr(back, name) == getattr(batch, name), name
    assert back.traceparent == batch.traceparent
    assert (back.rejected is None) == (batch.rejected is None)
    if back.rejected is not None and batch.rejected is not None:
        assert bytes(back.rejected.hidden.view) == bytes(batch.rejected.hidden.view)
        assert back.all_rows == batch.rows + batch.rejected.rows
        for name in ("token_ids", "positions", "parents"):
            assert np.array_equal(getattr(back.rejected, name), getattr(batch.rejected, name)), name


def test_rejected_rows_add_tensors_and_change_nothing_else() -> None:
    fields, payload = encode_features(_batch())
    more_fields, more_payload = encode_features(_with_drafts([1, 2], [2, 3]))
    assert more_fields == fields
    known, more = decode_safetensors(payload), decode_safetensors(more_payload)
    assert {name: bytes(more[name].view) for name in known} == {
        name: bytes(known[name].view) for name in known
    }
    assert sorted(more.keys() - known.keys()) == [
        "rejected_hidden",
        "rejected_parents",
        "rejected_positions",
        "rejected_token_ids",
    ]


def test_rejected_rows_are_views_of_the_payload() -> None:
    fields, payload = encode_features(_with_drafts([1, 2], [2, 3]))
    rejected = decode_features(fields, payload).rejected
    assert rejected is not None
    for array in (
        as_numpy(rejected.hidden),
        rejected.token_ids,
        rejected.positions,
        rejected.parents,
    ):
        assert np.shares_memory(array, np.frombuffer(payload, np.uint8))
        assert array.flags.aligned


@pytest.mark.parametrize(
    ("parents", "positions", "changes", "match"),
    [
        ([2], [2], {}, "parent does not stand before it"),
        ([-1], [2], {}, "parent does not stand before it"),
        ([1, 0], [2, 2], {}, "does not follow its parent"),
        ([1], [2], {"token_ids": np.zeros(2, np.int32)}, "do not fit"),
        (
            [1],
            [2],
            {"hidden": NamedTensor("rejected_hidden", "BF16", (1, 2), bytes(4))},
            "another form",
        ),
        (
            [1],
            [2],
            {"hidden": NamedTensor("rejected_hidden", "F32", (1, 3), bytes(12))},
            "another form",
        ),
        (
            [1],
            [2],
            {"hidden": NamedTensor("rejected_hidden", "BF16", (2, 3), bytes(12))},
            "do not fit",
        ),
    ],
)
def test_rejected_rows_that_hang_wrongly_are_refused(
    parents: list[int], positions: list[int], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInput, match=match):
        _with_drafts(parents, positions, **changes)


@pytest.mark.parametrize("name", ["hidden", "token_ids", "positions", "parents"])
def test_a_payload_with_a_part_of_the_rejected_rows_is_data_loss(name: str) -> None:
    fields, payload = encode_features(_with_drafts([1, 2], [2, 3]))
    parts = [part for key, part in decode_safetensors(payload).items() if key != f"rejected_{name}"]
    with pytest.raises(DataLoss, match="lacks"):
        decode_features(fields, encode_safetensors(parts))


def test_decoded_rows_are_views_of_the_payload() -> None:
    fields, payload = encode_features(_batch())
    rows = as_numpy(decode_features(fields, payload).hidden)
    assert np.shares_memory(rows, np.frombuffer(payload, np.uint8))


def test_the_fields_say_what_the_rows_are() -> None:
    fields, _ = encode_features(_batch())
    assert {
        name: fields[name]
        for name in ("dtype", "rows", "hidden", "layers", "convention", "schema_version")
    } == {
        "dtype": "BF16",
        "rows": "2",
        "hidden": "3",
        "layers": "last",
        "convention": "post_norm",
        "schema_version": "1",
    }


def test_a_missing_reward_is_not_zero() -> None:
    with_zero = Trajectory(BranchKey("r", "s"), 0, "t", "g", 1, 0, 0, (), (), (), (), 0.0, 0, 1.0)
    without = Trajectory(BranchKey("r", "s"), 0, "t", "g", 1, 0, 0, (), (), (), (), None, 0, 1.0)
    assert decode_trajectory(*encode_trajectory(with_zero)).reward == 0.0
    assert decode_trajectory(*encode_trajectory(without)).reward is None


@pytest.mark.parametrize("count", ["0", "-1", "", "1.5"])
def test_a_branch_that_its_session_does_not_count_is_data_loss(count: str) -> None:
    fields, payload = encode_trajectory(_trajectory())
    assert decode_trajectory({**fields, "branch_count": "2"}, payload).branch_count == 2
    with pytest.raises(DataLoss):
        decode_trajectory({**fields, "branch_count": count}, payload)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_trajectory_payload_is_data_loss(data: st.DataObject) -> None:
    fields, payload = encode_trajectory(_trajectory())
    with pytest.raises(DataLoss):
        decode_trajectory(fields, data.draw(_damaged(payload)))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_feature_payload_is_data_loss_or_other_numbers(data: st.DataObject) -> None:
    fields, payload = encode_features(
        data.draw(st.sampled_from([_batch(), _with_drafts([1, 2, 2], [2, 3, 3])]))
    )
    with suppress(DataLoss):
        decode_features(fields, data.draw(_damaged(payload)))


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_cut_feature_payload_is_data_loss(cut: int) -> None:
    fields, payload = encode_features(_batch())
    with pytest.raises(DataLoss):
        decode_features(fields, payload[: cut % len(payload)])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_field_is_data_loss_or_another_value(data: st.DataObject) -> None:
    for encode, decode, subject in (
        (encode_trajectory, decode_trajectory, _trajectory()),
        (encode_features, decode_features, _batch()),
    ):
        fields, payload = encode(subject)  # type: ignore[operator]
        name = data.draw(st.sampled_from(sorted(fields)))
        changed = data.draw(
            st.none()
            | st.text(max_size=6)
            | st.sampled_from(["-1", "1e400", "9" * 400, "nan", "٣"])
        )
        damaged = {key: value for key, value in fields.items() if key != name}
        if changed is not None:
            damaged[name] = changed
        with suppress(DataLoss):
            decode(damaged, payload)


@pytest.mark.parametrize(
    "name", ["schema_version", "crc32", "seed", "speculation", "reward", "session", "branch_count"]
)
def test_a_missing_field_is_data_loss(name: str) -> None:
    fields, payload = encode_trajectory(_trajectory())
    del fields[name]
    with pytest.raises(DataLoss):
        decode_trajectory(fields, payload)


def test_another_layout_is_refused_by_name() -> None:
    fields, payload = encode_trajectory(_trajectory())
    with pytest.raises(DataLoss, match="seen: 2; allowed: 1"):
        decode_trajectory({**fields, "schema_version": "2"}, payload)


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
