"""SGLang with an EAGLE drafter and Paceline's plugin: the demo's policy, trees and chains, another
arm every round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from sglang_served import (
    DEMO,
    Served,
    chi_square_p,
    exact_pairs,
    greedy,
    hidden,
    load_oracle,
    pair_counts,
    said,
)
from transformers import AutoTokenizer, PreTrainedModel

from paceline.errors import WeightsError
from paceline.models.adapters import DOWN, FILE, UP, AddedAdapters, hash_of_start
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Finish, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = pytest.mark.sglang
ARMS = ("off", "eagle:1_1_2", "eagle:3_1_4", "eagle:2_2_5", "eagle:4_3_12")
QUESTIONS = ["48:36=", "91:35=", "17:5=", "84:60=", "99:12=", "7:3=", "64:40=", "51:34="]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "policy_trained")
    return [tokenizer.encode(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A fresh drafter under epsilon 1: the bandit draws an arm at random every round."""
    one = Served(
        tmp_path_factory.mktemp("eagle"),
        model_dir=str(DEMO / "policy_trained"),
        drafter=str(DEMO / "drafter_trained"),
        arms=ARMS,
        bandit={"epsilon": 1.0},
        max_sequence_tokens=256,
        prefill_tokens=16,
    )
    yield one
    one.client.close()


def embedded_tokens(prompts: list[list[int]], **sampling: object) -> list[list[int]]:
    """Tokens of the embedded engine without speculation."""
    spec = EmbeddedSpec(
        model_dir=str(DEMO / "policy_trained"), drafter="off", max_sequence_tokens=256
    )
    engine = EmbeddedEngine(spec, None)
    for number, prompt in enumerate(prompts):
        options = {"seed": 7 + number, "max_tokens": 24, "ignore_eos": True, **sampling}
        engine.enqueue(Request(number, tuple(prompt), Sampling(**options)))  # type: ignore[arg-type]
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    while engine.has_work:
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.token_ids
    return list(tokens.values())


def test_greedy_tokens_are_those_of_transformers_whatever_arm_each_round_draws(
    served: Served, prompts: list[list[int]], oracle: PreTrainedModel
) -> None:
    expected = [greedy(oracle, prompt, 40) for prompt in prompts]
    assert served.tokens(prompts, max_tokens=40) == expected
    for arm in ARMS:
        assert served.tokens(prompts, max_tokens=40, arm=arm) == expected
    pulled = {report.arm for report in served.health().arms if report.pulls}
    assert pulled == set(ARMS)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.25, "presence_penalty": -0.5},
        {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": ((20, 3.0), (21, -100.0))},
    ],
    ids=["full", "top_p", "top_k", "min_p", "penalties", "greedy with penalties and bias"],
)
def test_sampled_tokens_are_those_of_the_embedded_engine_with_the_same_seeds(
    served: Served, prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    sampling = {"temperature": 1.0, **sampling}
    expected = embedded_tokens(prompts, **sampling)
    assert served.tokens(prompts, **sampling) == expected
    assert served.tokens(prompts, arm="off", **sampling) == expected


@pytest.mark.parametrize(
    "demand",
    [
        {"json_schema": '{"type": "array", "items": {"enum": [0.5, "x"]}, "maxItems": 3}'},
        {"regex": "[0-9]{2}(-[a-f]{3})+", "temperature": 2.0},
        {"choice": ("12+1", "12-30", "9"), "repetition_penalty": 1.2},
        {"grammar": 'start: pair ("," pair)*\npair: /[a-c]/ "=" %json {"type": "integer"}'},
    ],
    ids=["json", "regex", "choice with a penalty", "grammar"],
)
def test_structured_tokens_are_those_of_the_embedded_engine_whatever_is_drafted(
    served: Served, prompts: list[list[int]], demand: dict[str, Any]
) -> None:
    sampling = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 60, **demand}
    expected = embedded_tokens(prompts, **sampling)
    assert served.tokens(prompts, **sampling) == expected
    for arm in ("off", "eagle:4_3_12"):
        assert served.tokens(prompts, arm=arm, **sampling) == expected
    free = [prompt * 2 for prompt in prompts[:3]]  # beside rows without a grammar
    alone = served.tokens(free, temperature=1.0)
    numbers = served.send(prompts, **sampling)
    assert served.tokens(free, temperature=1.0) == alone
    assert [said(chunks) for chunks in served.wait(numbers)] == expected


def test_a_structured_response_that_cannot_go_on_ends_alone(
    served: Served, prompts: list[list[int]]
) -> None:
    """This expression exceeds the limits of a step after some tokens."""
    growing = "(((a|b?c)*[a-z]{0,900}){0,900}d){0,900}" * 200 + "e{20}"
    alone = served.tokens(prompts[:3], temperature=1.0)
    numbers = served.send(
        prompts[3:5], regex=growing, temperature=1.0, ignore_eos=False, max_tokens=150
    )
    assert served.tokens(prompts[:3], temperature=1.0) == alone
    for chunks in served.wait(numbers):
        assert chunks[-1].finish is Finish.ERROR
        assert chunks[-1].error.startswith(
            "INVALID_INPUT: structured_outputs.regex cannot be followed"
        )
    assert served.tokens(prompts[:3], temperature=1.0) == alone


@pytest.mark.parametrize("arm", ["off", "eagle:3_1_4", "eagle:4_3_12"])
def test_pairs_of_tokens_come_with_their_exact_probabilities(
    served: Served, prompts: list[list[int]], oracle: PreTrainedModel, arm: str
) -> None:
    exact = exact_pairs(oracle, prompts[0], temperature=2.5, top_k=3)
    counts = pair_counts(served, prompts[0], 600, temperature=2.5, top_k=3, arm=arm)
    assert chi_square_p(counts, exact) > 0.001


def test_behavior_logprobs_are_log_softmax_of_the_tempered_logits(
    served: Served, prompts: list[list[int]], oracle: PreTrainedModel
) -> None:
    for prompt, chunks in zip(
        prompts, served.wait(served.send(prompts, temperature=0.8)), strict=True
    ):
        tokens = said(chunks)
        with torch.inference_mode():
            logits = (
                oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
                / 0.8
            )
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = torch.tensor(
            [value for chunk in chunks for value in chunk.behavior_logprobs], dtype=torch.float64
        )
        assert (found - expected).abs().max() < 1e-4


def test_rows_are_the_states_of_transformers_over_chunks_prefixes_stops_retractions_and_aborts(
    served: Served, prompts: list[list[int]], oracle: PreTrainedModel
) -> None:
    """Prompts of several prefill chunks, repeated so that all but the newest token come from the
    prefix cache.
    """
    long = [prompt * 6 for prompt in prompts[:4]]
    stop = greedy(oracle, long[0], 8)[-1]
    first = served.send(long, temperature=1.0)
    served.wait(first)
    again = served.send(long, temperature=1.0, seeds=[70, 71, 72, 73])
    stopped = served.send(long[:1], stop_token_ids=(stop,))
    left = served.send(long[1:2], max_tokens=120)
    retracted = served.send(long[2:], seeds=[80, 81], temperature=1.0, max_tokens=60)
    served.rounds(30)
    served.client.ask(pause=pb.PauseGeneration(mode=pb.PAUSE_MODE_RETRACT))
    served.client.ask(**{"continue": pb.ContinueGeneration()})
    served.client.send(abort=pb.AbortRequests(request_ids=left))
    assert served.wait(left)[0][-1].finish is Finish.ABORT
    cached = [chunks[-1].cached_prompt_tokens for chunks in served.wait(again)]
    assert min(cached) >= 30
    assert served.wait(stopped)[0][-1].finish is Finish.STOP
    prompt_of = dict(
        zip(
            [*first, *again, *stopped, *retracted],
            [*long, *long, *long[:1], *long[2:]],
            strict=True,
        )
    )
    for numbers in (first, again, stopped, retracted):
        for number, chunks in zip(numbers, served.wait(numbers), strict=True):
            tokens = [*prompt_of[number], *said(chunks)]
            rows, expected = served.kept.of(number, tokens), hidden(oracle, tokens)
            assert (rows - expected).abs().max() <= 1e-4
            assert (rows[1:] - expected[:-1]).abs().max() > 0.1  # a shift by one row would show
    assert served.kept.twice == 0


def versions_during(
    served: Served, prompts: list[list[int]], mode: int, seq: int, policy: int
) -> list[list[VersionSpan]]:
    """Version spans of requests that were running while a policy was committed."""
    numbers = served.send(prompts, max_tokens=100, stream=True)
    served.rounds(len(prompts) * 6)
    prepare_policy(served, policy, DEMO / ("policy_start" if policy == 1 else "policy_trained"))
    versions = tpb.VersionSet(seq=seq, policy=policy, drafter=served.health().versions.drafter)
    served.client.ask(commit_weights=pb.CommitWeights(versions=versions, mode=mode))
    found = []
    for chunks in served.wait(numbers):
        spans = [span for chunk in chunks for span in chunk.version_spans]
        assert spans[-1].end == len(said(chunks))
        found.append(spans)
    return found


@pytest.mark.parametrize(
    ("mode", "seq"),
    [(pb.PAUSE_MODE_IN_PLACE, 1), (pb.PAUSE_MODE_RETRACT, 3), (pb.PAUSE_MODE_ABORT, 5)],
)
def test_new_weights_change_what_is_said_and_the_old_ones_restore_it(
    served: Served, prompts: list[list[int]], mode: int, seq: int
) -> None:
    before = served.tokens(prompts, max_tokens=40)
    spans = versions_during(served, prompts[:4], mode, seq, 1)
    for one in spans:
        seen = [span.policy_version for span in one]
        assert seen == sorted(seen)
        assert set(seen) == ({0} if mode == pb.PAUSE_MODE_ABORT else {0, 1})
    start = load_oracle(DEMO / "policy_start")
    assert served.tokens(prompts, max_tokens=40) == [
        greedy(start, prompt, 40) for prompt in prompts
    ]
    versions_during(served, prompts[:4], mode, seq + 1, 0)
    assert served.tokens(prompts, max_tokens=40) == before


def test_a_drafter_update_changes_how_much_is_accepted_and_no_token(
    served: Served, prompts: list[list[int]]
) -> None:
    def run() -> tuple[list[list[int]], float]:
        chunks = served.wait(served.send(prompts, max_tokens=60, arm="eagle:3_1_4"))
        lengths = [one[-1].speculation.accept_length for one in chunks]
        return [said(one) for one in chunks], sum(lengths) / len(lengths)

    tokens, trained = run()
    from paceline.models.config import read_config
    from paceline.speculators.eagle import EagleNet

    fresh = served.client.log_path.parent / "fresh"
    EagleNet(read_config(DEMO / "policy_trained"), seed=3).save(fresh)
    now = served.health().versions
    for number, path in ((1, fresh), (2, DEMO / "drafter_trained")):
        prepare = pb.PrepareWeights(target=pb.WEIGHT_TARGET_DRAFTER, version=number, path=str(path))
        served.client.ask(prepare_weights=prepare)
        versions = tpb.VersionSet(seq=now.seq + number, policy=now.policy, drafter=number)
        served.client.ask(
            commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_IN_PLACE)
        )
        again, accepted = run()
        assert again == tokens
        if number == 1:
            assert accepted < 1.5 < trained
    assert accepted == pytest.approx(trained, abs=0.05)


def test_a_drafter_that_carries_the_targets_embedding_leaves_it_alone(
    served: Served, prompts: list[list[int]]
) -> None:
    from safetensors.torch import load_file

    before = served.tokens(prompts)
    folder = served.client.log_path.parent / "with_embedding"
    folder.mkdir()
    tensors = load_file(DEMO / "drafter_trained" / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(320, 128)
    save_file(tensors, folder / "model.safetensors")
    now = served.health().versions
    served.client.ask(
        prepare_weights=pb.PrepareWeights(
            target=pb.WEIGHT_TARGET_DRAFTER, version=9, path=str(folder)
        )
    )
    versions = tpb.VersionSet(seq=now.seq + 1, policy=now.policy, drafter=9)
    served.client.ask(
        commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_IN_PLACE)
    )
    assert served.tokens(prompts) == before


def adapters(policy: Path, folder: Path, start: str) -> PreTrainedModel:
    """A version of adapters over a policy's query and gate matrices, which SGLang fuses with other
    matrices; returns transformers' policy with the adapters added.
    """
    draw, given = torch.Generator().manual_seed(5), dict[str, torch.Tensor]()
    model = load_oracle(policy)
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "gate_proj.weight")):
            stem = name.removesuffix(".weight")
            down = given[stem + DOWN] = 0.1 * torch.randn(4, weight.shape[1], generator=draw)
            up = given[stem + UP] = 0.1 * torch.randn(weight.shape[0], 4, generator=draw)
            weight.data += 2.0 * up @ down
    folder.mkdir()
    save_file(given, folder / "model.safetensors")
    (folder / FILE).write_text(AddedAdapters(2.0, start).text())
    return model


def test_adapters_alone_are_served_added_to_the_start_policy_until_a_whole_one_follows(
    served: Served, prompts: list[list[int]], tmp_path: Path
) -> None:
    policy = DEMO / "policy_trained"
    before, now = served.tokens(prompts, max_tokens=40), served.health().versions
    expected = adapters(policy, tmp_path / "added", hash_of_start(policy))
    adapters(policy, tmp_path / "of another", "0" * 16)
    with pytest.raises(WeightsError, match="another start policy; seen: 0000"):
        prepare_policy(served, 90, tmp_path / "of another")
    for number, path in enumerate((tmp_path / "added", policy), 1):
        prepare_policy(served, 90 + number, path)
        versions = tpb.VersionSet(seq=now.seq + number, policy=90 + number, drafter=now.drafter)
        served.client.ask(
            commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_RETRACT)
        )
        answers = served.tokens(prompts, max_tokens=40)
        assert answers == (
            [greedy(expected, one, 40) for one in prompts] if number == 1 else before
        )
        assert (answers != before) == (number == 1)


def prepare_policy(served: Served, version: int, path: Path) -> None:
    served.client.ask(
        prepare_weights=pb.PrepareWeights(
            target=pb.WEIGHT_TARGET_POLICY, version=version, path=str(path)
        )
    )


def test_a_worker_is_its_host_and_its_schedulers(served: Served) -> None:
    begun = psutil.Process(served.client.process.pid).children(recursive=True)
    commands = [" ".join(one.cmdline()) for one in begun]
    named = [command.strip() for command in commands if command.startswith("sglang::")]
    assert named == ["sglang::scheduler"]


@pytest.mark.parametrize("paused", [False, True], ids=["nothing to do", "paused with requests"])
def test_an_engine_with_nothing_to_do_leaves_its_core(
    served: Served, prompts: list[list[int]], paused: bool
) -> None:
    numbers = []
    if paused:
        numbers = served.send(prompts, max_tokens=100)
        served.client.ask(pause=pb.PauseGeneration(mode=pb.PAUSE_MODE_IN_PLACE))
    family = [
        served.client.process.pid,
        *(p.pid for p in psutil.Process(served.client.process.pid).children(True)),
    ]
    processes = [psutil.Process(pid) for pid in family]

    def seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    started, used = time.monotonic(), seconds()
    while time.monotonic() < started + 4:
        served.client._socket.poll(500)  # no message arrives
    share = (seconds() - used) / (time.monotonic() - started)
    if paused:
        served.client.ask(**{"continue": pb.ContinueGeneration()})
        served.wait(numbers)
    assert share < 0.05
