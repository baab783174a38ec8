"""Penalties of running requests: affected requests, counted tokens, and the embedded engine against
oracles.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gumbel_oracle
import numpy as np
import numpy.typing as npt
import pytest
import torch
from random_models import save_random
from transformers import PreTrainedModel

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, PauseMode, Request
from paceline.services.rollout_gateway.engines.requests.draws import Penalties
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling, check_sampling
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import Drawn, Tracked
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.trajectory import NEAR_TIE_GAP
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

VOCAB = 12
ARMS = ("off", "eagle:3_1_4", "eagle:5_1_6", "ngram:4_1_5", "")
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"frequency_penalty": -0.6, "logit_bias": ((11, 4.0), (12, -100.0))},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "top_k": 12},
]


def sequence(
    prompt: Sequence[int] = (1, 2), tokens: Sequence[int] = (), **sampling: Any
) -> RunningSequence:
    request = Request(1, tuple(prompt), Sampling(seed=1, max_tokens=50, **sampling))
    return RunningSequence(
        request, frozenset(), 50, length=len(prompt) + len(tokens), tokens=list(tokens)
    )


def random_logits(batch: int, nodes: int) -> torch.Tensor:
    return torch.randn(batch, nodes, VOCAB, generator=torch.Generator().manual_seed(2)) * 3


def test_a_batch_that_asks_for_nothing_gets_no_tensor_and_no_counts() -> None:
    penalties = Penalties()
    rows = [sequence(), None, sequence(top_p=0.5)]
    assert penalties.adjust(rows, random_logits(3, 2), torch.zeros(3, 2, dtype=torch.int64)) is None
    assert len(penalties) == 0


def test_rows_that_do_not_ask_keep_every_bit_and_the_given_logits_stay() -> None:
    penalties, logits = Penalties(), random_logits(4, 2)
    before = logits.clone()
    rows = [
        sequence(tokens=[5]),
        sequence(tokens=[5], presence_penalty=2.0),
        None,
        sequence(logit_bias=((3, 7.0),)),
    ]
    adjusted = penalties.adjust(rows, logits, torch.zeros(4, 2, dtype=torch.int64))
    assert adjusted is not None
    assert torch.equal(logits, before)
    assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])
    changed = (adjusted - logits).nonzero().tolist()
    assert changed == [[1, 0, 5], [1, 1, 0], [1, 1, 5], [3, 0, 3], [3, 1, 3]]
    assert len(penalties) == 1  # a bias alone needs no counts


def test_counts_follow_a_response_that_grows_and_are_dropped_with_it() -> None:
    penalties, logits = Penalties(), random_logits(1, 1)
    one = sequence(frequency_penalty=1.0)
    for tokens in ([], [4], [4, 4, 7], [4, 4, 7], [4, 4, 7, 4]):
        one.tokens[:] = tokens
        adjusted = penalties.adjust([one], logits, torch.tensor([[3]]))
        assert adjusted is not None
        expected = logits[0, 0].double().numpy() - np.bincount(tokens, minlength=VOCAB)
        np.testing.assert_allclose(adjusted[0, 0].numpy(), expected, atol=1e-6)
    assert len(penalties) == 1
    penalties.drop([one, sequence()])
    assert len(penalties) == 0


def test_a_draft_counts_on_its_own_branch_only() -> None:
    penalties, logits = Penalties(), random_logits(1, 4)
    one = sequence(tokens=[4], frequency_penalty=1.0)
    tree, tokens = torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[4, 4, 9, 2]])
    adjusted = penalties.adjust([one], logits, tokens, tree)
    assert adjusted is not None
    said_at = ([4], [4, 4], [4, 9], [4, 4, 2])
    expected = torch.stack(
        [torch.bincount(torch.tensor(said), minlength=VOCAB) for said in said_at]
    )
    torch.testing.assert_close((logits - adjusted)[0], expected.float())


def test_tokens_drawn_ahead_count_without_being_kept() -> None:
    penalties, logits = Penalties(), random_logits(2, 1)
    rows = [
        sequence(tokens=[4], frequency_penalty=1.0),
        sequence(tokens=[4], frequency_penalty=1.0),
    ]
    roots = torch.zeros(2, 1, dtype=torch.int64)
    for _ in range(2):
        adjusted = penalties.adjust(rows, logits, roots, ahead={1: [4, 6]})
        assert adjusted is not None
        lowered = (logits - adjusted)[:, 0]
        torch.testing.assert_close(lowered[0], torch.eye(VOCAB)[4])
        torch.testing.assert_close(lowered[1], 2 * torch.eye(VOCAB)[4] + torch.eye(VOCAB)[6])


def test_a_device_that_runs_ahead_tells_the_tokens_between_the_taken_and_the_drawn() -> None:
    tracked = Tracked(sequence(prompt=(1, 2, 3), tokens=[7]), 0)
    tracked.draws = {
        1: Drawn(8, -1.0, 1.0, DrawnBy(0, "off", "float32")),
        2: Drawn(9, -1.0, 1.0, DrawnBy(0, "off", "float32")),
    }
    assert tracked.ahead(4) == []  # the token after the taken one
    assert tracked.ahead(6) == [8, 9]
    assert tracked.ahead(2) == []  # a part of the prompt


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"presence_penalty": 2.1}, r"presence_penalty .* seen: 2.1.*-2 to 2"),
        ({"frequency_penalty": -3.0}, r"frequency_penalty .* seen: -3.0.*-2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty .* seen: 0.0.*0.1 to 10"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty .* seen: inf"),
        ({"logit_bias": ((12, 1.0),)}, r"logit_bias names .* seen: 12.*0 to 11"),
        ({"logit_bias": ((3, 100.5),)}, r"logit_bias of token 3 .* seen: 100.5.*-100 to 100"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias of token 3"),
        (
            {"logit_bias": tuple((token, 1.0) for token in range(301))},
            "logit_bias .* seen: 301.*300",
        ),
    ],
)
def test_values_out_of_range_are_named_with_what_is_allowed(
    setting: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        check_sampling(Sampling(1, 4, **setting), VOCAB)


def test_penalties_on_the_wire_are_those_of_the_message_and_absent_ones_are_off() -> None:
    plain = wire.request_from(pb.EngineRequest(sampling=tpb.SamplingParams(max_tokens=1))).sampling
    assert (plain.repetition_penalty, plain.adjusted) == (1.0, False)
    bias = {7: -100.0, 3: 2.5}
    message = tpb.SamplingParams(
        presence_penalty=0.5, frequency_penalty=-2, repetition_penalty=1.5, logit_bias=bias
    )
    asked = wire.request_from(pb.EngineRequest(sampling=message)).sampling
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (
        0.5,
        -2.0,
        1.5,
    )
    assert asked.logit_bias == ((3, 2.5), (7, -100.0))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    return save_random(model_dir, "llama", sharpness=5.0)


def generate(
    model_dir: Path, requests: list[Request], arm: str, *, retract: bool = False
) -> dict[int, Chunk]:
    """Return last chunks by request. Three slots only, so that requests move when other requests
    end.
    """
    settings = {
        "model_dir": str(model_dir),
        "drafter": "eagle",
        "max_batch": 3,
        "max_sequence_tokens": 96,
    }
    spec = EmbeddedSpec.model_validate({**settings, "bandit": {"epsilon": 1.0}})
    engine = EmbeddedEngine(spec)
    engine.force_arm(arm)
    for one in requests:
        engine.enqueue(one)
    ended: dict[int, Chunk] = {}
    while engine.has_work:
        ended.update({chunk.request_id: chunk for chunk in engine.step()})
        if retract:
            engine.pause(PauseMode.RETRACT)
            engine.resume()
    return ended


def mixed_requests() -> list[Request]:
    """Requests with every kind of penalty and with none, of different lengths."""
    settings = [*PENALTIES, {}, *PENALTIES, {}]
    return [
        Request(
            number,
            (5 + number, 6, 7, 6),
            Sampling(
                seed=900 + number,
                max_tokens=12 + 3 * number,
                temperature=0.8,
                ignore_eos=True,
                **asked,
            ),
        )
        for number, asked in enumerate(settings)
    ]


def adjusted_by_hand(
    logits: npt.NDArray[np.float64], prompt: Sequence[int], said: Sequence[int], sampling: Sampling
) -> npt.NDArray[np.float64]:
    """The written formulas, token by token."""
    adjusted = logits.copy()
    for token in {*prompt, *said}:
        r = sampling.repetition_penalty
        adjusted[token] = adjusted[token] / r if adjusted[token] > 0 else adjusted[token] * r
    for token in set(said):
        adjusted[token] -= (
            sampling.frequency_penalty * list(said).count(token) + sampling.presence_penalty
        )
    for token, value in sampling.logit_bias:
        adjusted[token] += value
    if sampling.top_k:
        adjusted[np.argsort(adjusted)[: -sampling.top_k]] = -1e9
    return adjusted


def test_tokens_are_drawn_from_adjusted_logits_and_logprobs_are_of_the_raw_ones(
    model: PreTrainedModel, model_dir: Path
) -> None:
    requests = mixed_requests()
    for number, chunk in generate(model_dir, requests, "").items():
        prompt, sampling, said = requests[number].prompt, requests[number].sampling, chunk.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *said]])).logits[0].double().numpy()
        for index, (token, logprob) in enumerate(zip(said, chunk.behavior_logprobs, strict=True)):
            raw, position = logits[len(prompt) + index - 1], len(prompt) + index
            adjusted = adjusted_by_hand(raw, prompt, said[:index], sampling).astype(np.float32)
            assert token == gumbel_oracle.draw(adjusted, 0.8, sampling.seed, position)[0], (
                number,
                index,
            )
            scaled = raw / 0.8 - (raw / 0.8).max()
            assert logprob == pytest.approx(scaled[token] - np.log(np.exp(scaled).sum()), abs=2e-5)


@pytest.mark.slow
def test_every_arm_and_a_rebuilt_cache_give_the_tokens_of_plain_decoding(
    model: PreTrainedModel, model_dir: Path
) -> None:
    requests = mixed_requests()
    plain = generate(model_dir, requests, "off")
    expected = {number: chunk.token_ids for number, chunk in plain.items()}
    assert min(chunk.smallest_gap for chunk in plain.values()) > NEAR_TIE_GAP, "choose other seeds"
    for arm in ARMS[1:]:
        drafted = generate(model_dir, requests, arm)
        assert {number: chunk.token_ids for number, chunk in drafted.items()} == expected, arm
        assert sum(chunk.speculation.accepted_tokens for chunk in drafted.values()) > 0
    retracted = generate(model_dir, requests, "eagle:3_1_4", retract=True)
    assert {number: chunk.token_ids for number, chunk in retracted.items()} == expected


def test_the_engine_drops_counts_of_requests_that_ended_or_were_aborted(
    model: PreTrainedModel, model_dir: Path
) -> None:
    engine = EmbeddedEngine(
        EmbeddedSpec.model_validate({"model_dir": str(model_dir), "max_sequence_tokens": 96})
    )
    assert isinstance(engine, EmbeddedEngine)
    for number, limit in enumerate((2, 60)):
        sampling = Sampling(seed=number, max_tokens=limit, ignore_eos=True, presence_penalty=1.0)
        engine.enqueue(Request(number, (5, 6), sampling))
    engine.step()
    assert len(engine._decoder._penalties) == 2
    while engine.load.running == 2:
        engine.step()
    assert len(engine._decoder._penalties) == 1
    engine.abort(None)
    assert len(engine._decoder._penalties) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("arm", ARMS)
def test_greedy_tokens_with_a_repetition_penalty_are_those_transformers_generates(
    model: PreTrainedModel, model_dir: Path, arm: str
) -> None:
    prompts = [(5, 6, 7), (9, 9, 4, 30), (50,), (61, 2, 18, 18, 18)]
    sampling = Sampling(
        seed=1, max_tokens=40, temperature=0.0, repetition_penalty=1.3, ignore_eos=True
    )
    ended = generate(
        model_dir, [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)], arm
    )
    changed = generate(
        model_dir, [Request(0, prompts[0], Sampling(1, 40, 0.0, ignore_eos=True))], arm
    )
    assert changed[0].token_ids != ended[0].token_ids
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        said = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=1.3,
            eos_token_id=None,
        )
        assert list(ended[number].token_ids) == said[0, len(prompt) :].tolist()


@pytest.mark.parametrize("drawn_ahead", [0, 2])
def test_stops_are_forbidden_at_the_nodes_that_draw_a_token_before_min_tokens(
    drawn_ahead: int,
) -> None:
    """A tree of depth 3 behind two tokens that were taken, and some that a device running ahead has
    drawn: the root draws token number 2 + drawn_ahead.
    """
    asked = sequence(tokens=[5, 6], min_tokens=4, stop_token_ids=(3, 9))
    stopping = RunningSequence(asked.request, frozenset({3, 9, 400}), 50, length=4, tokens=[5, 6])
    free, logits = sequence(tokens=[5]), random_logits(2, 5)
    tokens = torch.tensor([[6, 7, 8, 7, 4]] * 2)
    parents = torch.tensor([[-1, 0, 0, 1, 3]] * 2)
    depths = [0, 1, 1, 2, 3]
    ahead = {0: [7] * drawn_ahead}
    adjusted = Penalties().adjust([stopping, free], logits, tokens, parents, ahead=ahead)
    assert adjusted is not None
    assert torch.equal(adjusted[1], logits[1])
    for node, depth in enumerate(depths):
        early = 2 + drawn_ahead + depth < 4
        for token in range(VOCAB):
            forbidden = early and token in (3, 9)
            value = float(adjusted[0, node, token])
            assert value == (-torch.inf if forbidden else float(logits[0, node, token]))


def test_bias_and_allowed_tokens_act_together() -> None:
    row = sequence(tokens=[5], allowed_token_ids=(2, 7), logit_bias=((2, 3.0), (4, 100.0)))
    logits = random_logits(1, 2)
    adjusted = Penalties().adjust([row], logits, torch.zeros(1, 2, dtype=torch.int64))
    assert adjusted is not None
    assert torch.equal(adjusted[0, :, 2], logits[0, :, 2] + 3.0)
    assert torch.equal(adjusted[0, :, 7], logits[0, :, 7])
    others = [token for token in range(VOCAB) if token not in (2, 7)]
    assert bool(adjusted[0][:, others].isneginf().all())
