"""The bench of peers: real engines on a tiny random model, its tables, and peers that fail."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
from random_models import save_random
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from benchmarks.demo_runs import demo_folder
from benchmarks.peers import run as peers
from benchmarks.peers.environments import PACKAGES, install
from benchmarks.peers.run import PeerCase, RunningPeer
from benchmarks.processes import BenchChild
from paceline.errors import InvalidInput, NotFound, Unavailable


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny random model with a token for each frequent character, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    save_random(directory, "llama")
    text = (demo_folder().parents[1] / "ARCHITECTURE.md").read_text()
    letters = [letter for letter, _ in Counter(text).most_common(90)]
    vocabulary = {"?": 0} | {letter: 3 + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    return parser.parse_args(words)


def side(name: str, rates: list[float], tokens: list[list[int]]) -> RunningPeer:
    """Returns a peer without a process that has run the case "batch 2"."""
    none: BenchChild = object.__new__(BenchChild)
    return RunningPeer(name, none, Path("none"), {}, {"batch 2": rates}, {"batch 2": tokens})


async def test_real_engines_take_turns_and_give_the_same_greedy_tokens(
    model: Path, tmp_path: Path
) -> None:
    words = ["--dtype", "float32", "--turns", "2", "--batches", "1,2", "--new-tokens", "6"]
    words += ["--prefill", "32", "--threads", "1", "--markdown", str(tmp_path / "page.md")]
    result = await peers.run(options(*words, "--model", str(model)))
    cases = [row["case"] for row in result.rows if row["section"] == "float32, tokens/s"]
    memory = "memory (PSS), MiB"
    sampled = "batch 2, T 0.8, top-p 0.95"
    assert cases == ["batch 1", "batch 2", sampled, memory, "prefill 32", memory]
    for row in result.rows:
        if "greedy" in str(row["section"]):
            assert row["transformers"] == row["tokens"]
        else:
            shown = (str(row[name]) for name in ("paceline", "transformers"))
            assert all(float(one.replace(",", "")) > 0 for one in shown)
    assert [row["tokens"] for row in result.rows if "tokens" in row] == [6, 12]
    assert result.versions["transformers: transformers"]
    page = (tmp_path / "page.md").read_text()
    assert "| case | paceline | transformers | paceline / transformers |" in page
    assert page.count("| prefill 32 |") == 1


async def test_busy_processes_run_beside_the_peers_and_end_with_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    noted = f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a', buffering=1))"
    monkeypatch.setattr(peers, "BUSY", (sys.executable, "-c", f"{noted}\nwhile True: pass"))
    words = ["--dtype", "float32", "--turns", "1", "--batches", "1", "--new-tokens", "4"]
    words += ["--prefill", "16", "--threads", "1", "--peers", "transformers", "--busy", "2"]
    result = await peers.run(options(*words, "--model", str(model)))
    assert "2 busy processes" in result.title
    started = pids.read_text().split()
    assert len(started) == 2 * 2  # beside decoding, and beside prefills
    assert not any(map(psutil.pid_exists, map(int, started)))


async def test_a_peer_that_dies_in_a_turn_is_named_with_its_last_words(
    model: Path, tmp_path: Path
) -> None:
    plan = {"model": str(model), "dtype": "float32", "threads": 1, "batch": 1, "tokens": 64}
    async with AsyncExitStack() as stack:
        one = await peers.started("transformers", tmp_path, plan, stack)
        await one.run(PeerCase("batch 1", [[5, 6, 7]], 3), turn=1)
        assert one.rates["batch 1"][0] > 0
        with pytest.raises(Unavailable, match=r"transformers died: token 97.*IndexError"):
            await one.run(PeerCase("token 97", [[5, 97]], 3), turn=2)
    assert len(one.rates["batch 1"]) == 1


def test_ratios_are_of_paired_turns_and_equal_tokens_end_at_the_first_difference() -> None:
    ours = side("paceline", [20.0, 40.0, 30.0], [[1, 2, 3], [4, 5, 6]])
    theirs = side("vllm", [10.0, 20.0, 15.0], [[1, 2, 9], [7, 5, 6]])
    rows = peers.table("int8", [PeerCase("batch 2", [[1], [2]], 3)], [(ours, 1), (theirs, 2048)])
    assert rows[0]["paceline / vllm"] == "2.000 [2.000, 2.000]"
    assert (rows[0]["paceline"], rows[0]["vllm"]) == ("30.0", "15.0")
    assert rows[1]["vllm"] == "2,048"
    assert (rows[2]["tokens"], rows[2]["vllm"]) == (6, 2)
    (goal,) = peers.judged("int8", [PeerCase("batch 2", [[1], [2]], 3)], [(ours, 1), (theirs, 1)])
    assert (goal.met, goal.value) == (True, 2.0)


def test_a_prefill_counts_prompts_and_decoding_counts_what_follows_the_first_token() -> None:
    prompts = [[1] * 32, [2] * 32]
    assert PeerCase("prefill", prompts, 1).rate({"first_s": 2.0, "total_s": 2.0}) == 32.0
    assert PeerCase("decoding", prompts, 5).rate({"first_s": 1.0, "total_s": 2.0}) == 8.0


def test_a_missing_peer_is_left_out_or_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "paceline" / "peers" / "vllm" / "bin").mkdir(parents=True)  # half installed
    assert peers.chosen_peers(None) == ["paceline", "transformers"]
    assert "paceline bench peers --install llama.cpp" in capsys.readouterr().err
    with pytest.raises(NotFound, match="paceline bench peers --install vllm"):
        peers.chosen_peers("transformers,vllm")
    with pytest.raises(InvalidInput, match=", ".join(PACKAGES)):
        peers.chosen_peers("sglang")


async def test_an_installation_that_fails_leaves_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(PACKAGES, "vllm", (str(tmp_path / "no-such-package"),))
    with pytest.raises(Unavailable, match=r"vllm cannot be installed.*no-such-package"):
        await install(["vllm"])
    with pytest.raises(NotFound):
        peers.chosen_peers("vllm")


async def test_a_missing_model_is_refused_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotFound, match=r"python examples/real/fetch_model\.py"):
        await peers.run(options("--peers", ""))


@pytest.mark.parametrize("words", [["--new-tokens", "1"], ["--batches", "33"]])
async def test_decoding_that_cannot_be_timed_is_refused(model: Path, words: list[str]) -> None:
    with pytest.raises(InvalidInput, match="cannot be timed"):
        await peers.run(options("--model", str(model), *words))
