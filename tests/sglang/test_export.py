"""Exported drafters in the real SGLang: each round accepts as many tokens as the embedded engine
does with the native files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_served import DEMO, Served, said, stock
from torch import Tensor
from transformers import AutoTokenizer
from typer.testing import CliRunner

from paceline.local.patience import patient
from paceline.models.decoder import Block
from paceline.services.drafter_trainer.export import app
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.speculators.base import DraftBatch
from paceline.speculators.layer_drafter import LayerDrafter
from paceline.speculators.net_drafter import Beam, NetDrafter

pytestmark = pytest.mark.sglang
POLICY = DEMO / "policy_start"
NEW_TOKENS, PROMPTS, LIMIT = 48, 16, 256
TREES = 48
"""Prompts of the test of deep trees: a quarter of the answers use branches."""
CONVERSATIONS = 256
LEARNING = {
    "steps": 50,
    "batch-tokens": 512,
    "row-tokens": 512,
    "window": 256,
    "lr": 6e-3,
    "warmup-steps": 5,
}
TRAINED = 1.4
"""Tokens per round that no untrained drafter reaches."""


def questions(file: str, count: int) -> list[list[int]]:
    """Prompts of the demo's tasks."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    lines = (DEMO / file).read_text(encoding="utf-8").splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


@pytest.fixture(autouse=True)
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded engine drafts the most likely tokens, as SGLang does."""
    monkeypatch.setattr(NetDrafter, "uses_noise", False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return questions("tasks_heldout.jsonl", PROMPTS)


def exported(native: Path, out: Path) -> Path:
    """Directory written by `paceline drafter export --format sglang`."""
    done = CliRunner().invoke(
        app,
        ["--from", str(native), "--model", str(POLICY), "--out", str(out), "--format", "sglang"],
    )
    assert done.exit_code == 0, done.output
    return out


def embedded(requests: Sequence[Request], drafter: str, *arms: str) -> list[list[Chunk]]:
    """Chunks of the embedded engine, which verifies every draft of an arm."""
    spec = EmbeddedSpec(
        model_dir=str(POLICY),
        drafter=drafter,
        arms=arms,
        verify_budget=False,
        max_sequence_tokens=LIMIT,
    )
    engine = EmbeddedEngine(spec, None)
    chunks: dict[int, list[Chunk]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.enqueue(request)
    while engine.has_work:
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
    engine.close()
    return list(chunks.values())


def rounds_of(chunks: Sequence[Chunk]) -> list[int]:
    """Tokens of each round: accepted drafts and the token after them."""
    return [len(chunk.token_ids) for chunk in chunks if chunk.token_ids]


def own_rounds(
    native: Path,
    arm: str,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    temperature: float,
) -> list[list[int]]:
    """Rounds of the embedded engine from the answers' first token on, because SGLang draws the
    first token without drafting.
    """
    sampling = {"max_tokens": NEW_TOKENS - 1, "temperature": temperature, "ignore_eos": True}
    requests = [
        Request(
            i, (*prompt, answer[0]), Sampling(seed=7 + i, **sampling), stream=True, forced_arm=arm
        )  # type: ignore[arg-type]
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    found = embedded(requests, str(native), "off", arm)
    assert [said(chunks) for chunks in found] == [list(answer[1:]) for answer in answers]
    return [rounds_of(chunks) for chunks in found]


def served_rounds(
    served: Served, arm: str, prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[list[list[int]], list[list[int]]]:
    """SGLang's answers without the first token, and the tokens of their rounds."""
    options = {
        "temperature": temperature,
        "max_tokens": NEW_TOKENS,
        "arm": arm,
        "stream": True,
        "capture": False,
    }
    found = served.wait(served.send(prompts, **options))
    rounds = [rounds_of(chunks) for chunks in found]
    assert {one[0] for one in rounds} == {1}
    return [said(chunks) for chunks in found], [one[1:] for one in rounds]


def accept_length(rounds: Sequence[Sequence[int]]) -> float:
    return sum(map(sum, rounds)) / sum(map(len, rounds))


# ---- EAGLE, the demo's trained drafter


@dataclass(frozen=True)
class Pair:
    """A native checkpoint and SGLang with its export."""

    native: Path
    served: Served


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A checkpoint with fewer positions in its config.json than the answers have."""
    folder = tmp_path_factory.mktemp("eagle")
    shutil.copytree(DEMO / "drafter_start", folder / "native")
    config = json.loads((folder / "native" / "config.json").read_text())
    (folder / "native" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 16})
    )
    yield from pair(folder, "eagle:3_1_4", "eagle:2_4_12", "eagle:6_4_24")


def pair(folder: Path, *arms: str) -> Iterator[Pair]:
    drafter = exported(folder / "native", folder / "exported")
    served = Served(
        folder,
        model_dir=str(POLICY),
        drafter=str(drafter),
        arms=arms,
        max_sequence_tokens=LIMIT,
        max_batch=PROMPTS,
    )
    yield Pair(folder / "native", served)
    served.client.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("arm", ["eagle:3_1_4", "eagle:2_4_12"])
def test_an_exported_eagle_accepts_in_each_round_what_the_native_one_does(
    eagle: Pair, prompts: list[list[int]], arm: str, temperature: float
) -> None:
    answers, rounds = served_rounds(eagle.served, arm, prompts, temperature)
    assert apart(rounds, own_rounds(eagle.native, arm, prompts, answers, temperature)) <= ties(arm)
    assert accept_length(rounds) > 1.7


def test_trees_of_more_than_two_levels_differ_only_in_the_rows_that_sglangs_branches_see(
    eagle: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang passes a node its parent's features but keeps the branch's keys (select_top_k_tokens).
    A node that moved to another branch therefore attends to the old branch's earlier nodes, not to
    its ancestors.
    """
    arm, prompts = "eagle:6_4_24", questions("tasks_heldout.jsonl", TREES)
    answers, rounds = served_rounds(eagle.served, arm, prompts, 1.0)
    own = own_rounds(eagle.native, arm, prompts, answers, 1.0)
    assert accept_length(rounds) == pytest.approx(accept_length(own), rel=0.05)
    assert apart(rounds, own) >= 3
    block_of = LayerDrafter._beam_block

    def branches(
        self: LayerDrafter, batch: DraftBatch, bases: Tensor, beam: Beam, seen: Tensor
    ) -> Block:  # type: ignore[type-arg]
        width = beam.tokens.shape[1]
        own_branch = torch.eye(width, dtype=torch.bool).repeat(1, beam.level)
        return block_of(self, batch, bases, beam, own_branch.expand(seen.shape))

    monkeypatch.setattr(LayerDrafter, "_beam_block", branches)
    assert (
        apart(rounds, own_rounds(eagle.native, arm, prompts, answers, 1.0))
        <= ties(arm) * TREES // 16
    )


def apart(rounds: list[list[int]], others: list[list[int]]) -> int:
    """Number of answers with other drafts."""
    return sum(one != other for one, other in zip(rounds, others, strict=True))


def ties(arm: str) -> int:
    """Number of 16 answers that may have other drafts. Of two equally likely nodes a tree keeps
    one; the last bit decides, which differs between batch shapes and machines.
    """
    return 0 if arm.split("_")[1] == "1" else 1


def test_max_position_embeddings_is_the_targets_whatever_the_native_checkpoint_says(
    eagle: Pair,
) -> None:
    config = json.loads((eagle.native.parent / "exported" / "config.json").read_text())
    target = json.loads((POLICY / "config.json").read_text())
    assert config["max_position_embeddings"] == target["max_position_embeddings"] == 512


# ---- EAGLE-3, trained here


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a `native` checkpoint of 12 tokens, other than the first 12; the real command
    trains it on the policy's own answers.
    """
    folder = tmp_path_factory.mktemp("eagle3")
    tasks = questions("tasks_train.jsonl", CONVERSATIONS)
    requests = [
        Request(i, tuple(task), Sampling(seed=i, max_tokens=100)) for i, task in enumerate(tasks)
    ]
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for task, chunks in zip(tasks, embedded(requests, "off", "off"), strict=True):
            tokens = said(chunks)
            record = {
                "input_ids": [*task, *tokens],
                "loss_mask": [0] * len(task) + [1] * len(tokens),
            }
            file.write(json.dumps(record) + "\n")
    paths = {
        "data": folder / "data.jsonl",
        "model": POLICY,
        "out": folder / "learned",
        "speculator": "eagle3",
    }
    settings = paths | LEARNING | {"heldout-share": 0.02}
    options = ["draft_vocab_size=12", "ttt_steps=3"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline.services.drafter_trainer.offline"]
        + [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        + [part for option in options for part in ("--options", option)],
        capture_output=True,
        text=True,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "learned" / "checkpoint" / "speculator").rename(folder / "native")
    return folder


@pytest.fixture(scope="module")
def narrow(eagle3: Path) -> Iterator[Pair]:
    yield from pair(eagle3, "eagle3:3_1_4", "eagle3:2_2_5")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("arm", ["eagle3:3_1_4", "eagle3:2_2_5"])
def test_an_exported_eagle3_of_few_tokens_accepts_in_each_round_what_the_native_one_does(
    narrow: Pair, prompts: list[list[int]], arm: str, temperature: float
) -> None:
    d2t = load_file(narrow.native.parent / "exported" / "model.safetensors")["d2t"]
    assert len(d2t) == 12
    assert len(d2t.unique()) > 1
    answers, rounds = served_rounds(narrow.served, arm, prompts, temperature)
    assert apart(rounds, own_rounds(narrow.native, arm, prompts, answers, temperature)) <= ties(arm)
    assert accept_length(rounds) > TRAINED


def test_an_exported_eagle3_accepts_in_the_unpatched_sglang_what_the_native_one_does(
    narrow: Pair, prompts: list[list[int]]
) -> None:
    chain = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    report = stock(
        {
            "model_path": str(POLICY),
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(narrow.native.parent / "exported"),
            **{f"speculative_{name}": value for name, value in chain.items()},
        },
        prompts,
        NEW_TOKENS,
    )
    own = own_rounds(narrow.native, "eagle3:3_1_4", prompts, report["tokens"], 0.0)
    assert report["rounds"] == [len(rounds) for rounds in own]
    assert accept_length(own) > TRAINED
