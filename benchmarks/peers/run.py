"""Measures the embedded engine beside transformers, llama.cpp and vLLM's CPU build.

Every engine is a process that loads the same checkpoint and rests while another engine has its
turn. All engines get the same prompt token ids, numbers of new tokens and threads, and ignore the
end of sequence. Decoding is timed from the moment when every prompt has its first token; prefill
ends with the first token. A turn runs one case in every engine; the first engine changes from turn
to turn. Memory is the PSS of an engine's processes after its last case.

The default model is the one that examples/real/fetch_model.py makes. Peers have virtual
environments of their own: --install makes them with pip, and compiles llama.cpp.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tokenizers import Tokenizer

from benchmarks.demo_runs import demo_folder
from benchmarks.options import above_zero, counts
from benchmarks.peers.environments import PACKAGES, cache_home, install, python_of
from benchmarks.processes import BenchChild, answering
from benchmarks.result import BenchResult, Goal, Row, paired_ratio, ratio_goal, say
from benchmarks.serving import random_prompt
from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.local.forking import IMPORT_ENVIRONMENT
from paceline.local.patience import patient
from paceline.local.processes import child_environment, last_lines
from paceline.models.config import read_config
from paceline.report.machine import versions

US = "paceline"
DTYPES = ("float32", "bfloat16", "int8")
"""int8: Paceline's int8_w8a8 beside llama.cpp's Q8_0."""
WITHOUT_INT8 = ("transformers", "vllm")
PROMPT_TOKENS = 64
MOST_AT_ONCE = 32
"""Prompts of a batch that Paceline's default settings prefill in one round."""
SAMPLED = (0.8, 0.95)  # temperature and top-p
FEWEST_TURNS, NEVER_SLOWER, SAMPLED_GOAL = 3, 1.0, 0.9
LOAD_S, CASE_S = 600.0, 300.0
BUSY = (sys.executable, "-c", "while True: pass")


@dataclass(frozen=True, slots=True)
class PeerCase:
    """One measurement: prompts of equal length and the tokens to generate."""

    name: str
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0

    def rate(self, answer: Mapping[str, Any]) -> float:
        """Tokens a second: of the prompts if the case is a prefill, else of decoding."""
        if self.new_tokens == 1:
            return len(self.prompts) * len(self.prompts[0]) / float(answer["first_s"])
        decoded = len(self.prompts) * (self.new_tokens - 1)
        return decoded / (float(answer["total_s"]) - float(answer["first_s"]))


@dataclass(slots=True)
class RunningPeer:
    """A running engine, and what it has answered."""

    name: str
    child: BenchChild
    log: Path
    versions: Mapping[str, str] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)  # of each case, turn by turn
    greedy: dict[str, list[list[int]]] = field(default_factory=dict)  # tokens of greedy cases

    async def ask(self, what: str, deadline_s: float, **request: Any) -> Mapping[str, Any]:
        """Raises Unavailable with the end of its output if the peer dies, DeadlineExceeded."""
        self.child.tell(**request)
        try:
            return await self.child.answer(patient(deadline_s))
        except Unavailable as error:
            seen = last_lines(self.log, 1) or "no output"
            raise Unavailable(f"{self.name} died: {what}", seen=seen) from error

    async def run(self, case: PeerCase, turn: int) -> None:
        """Runs a case; turn 0 warms up and is not kept."""
        answer = await self.ask(
            case.name,
            CASE_S,
            prompts=case.prompts,
            new_tokens=case.new_tokens,
            temperature=case.temperature,
            top_p=case.top_p,
            seed=turn,
        )
        if turn:
            self.rates.setdefault(case.name, []).append(case.rate(answer))
        if not case.temperature and case.new_tokens > 1:
            self.greedy[case.name] = answer["tokens"]

    def memory_mib(self) -> int:
        """PSS of its processes."""
        one = psutil.Process(self.child.pid)
        whole = (one, *one.children(recursive=True))
        return round(sum(process.memory_full_info().pss for process in whole) / 2**20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    option = parser.add_argument
    names = ", ".join(PACKAGES)
    option("--model", type=Path, help="a model's directory; else SmolLM2-135M-Instruct")
    option("--peers", help=f"of {names}, with commas; else all that are installed")
    option("--install", default="", metavar="PEERS", help=f"first install these of {names}")
    option("--threads", type=above_zero(int), default=2, help="of each engine")
    option("--dtype", default=",".join(DTYPES), help=f"of {', '.join(DTYPES)}, with commas")
    option("--batches", type=counts, default=(1, 4, 16), help="prompts at once; last one sampled")
    option("--turns", type=above_zero(int), default=5, help="of each engine; medians count")
    option("--new-tokens", type=above_zero(int), default=64, help="of every prompt, at least 2")
    option("--prefill", type=counts, default=(512, 4000), help="tokens of prompts to prefill")
    option("--busy", type=int, default=0, help="other processes that keep a core busy meanwhile")
    option("--markdown", type=Path, help="also write the tables to this file")


async def run(options: argparse.Namespace) -> BenchResult:
    """Installs what is asked, then measures one number format after the other.

    Raises InvalidInput for options out of range, NotFound for a missing model or peer, Unavailable
    if an installation fails or a peer dies, DeadlineExceeded if a peer does not answer.
    """
    dtypes = chosen(options.dtype, DTYPES)
    await install(chosen(options.install, tuple(PACKAGES)))
    peers = chosen_peers(options.peers)
    model = options.model or cache_home() / "smollm2" / "SmolLM2-135M-Instruct"
    if not (model / "config.json").is_file():
        fetch = "--model DIR, or python examples/real/fetch_model.py"
        raise NotFound("no model here", seen=model, allowed=fetch)
    if options.new_tokens < 2 or max(options.batches) > MOST_AT_ONCE:
        seen = f"{options.new_tokens} new tokens, batches {options.batches}"
        allowed = f"2 new tokens or more, batches up to {MOST_AT_ONCE}"
        raise InvalidInput("decoding cannot be timed", seen=seen, allowed=allowed)
    sections = [decoding(model, options.batches, options.new_tokens)]
    sections.append(prefills(model, options.prefill))
    rows, goals, found = list[Row](), list[Goal](), versions()
    for dtype in dtypes:
        names = [name for name in peers if dtype != "int8" or name not in WITHOUT_INT8]
        for cases in sections:
            sides = await in_turns(model, dtype, names, cases, options)
            rows += table(dtype, cases, sides)
            goals += judged(dtype, cases, sides)
            for side, _ in sides:
                found |= {f"{side.name}: {name}": one for name, one in side.versions.items()}
    beside = f", {options.busy} busy processes" if options.busy else ""
    title = f"{model.name}, {options.threads} threads, {options.turns} turns{beside}"
    result = BenchResult(title, rows, goals, versions=found)
    if options.markdown:
        options.markdown.write_text(markdown(result))
    return result


def chosen(text: str, allowed: Sequence[str]) -> list[str]:
    """Names of a comma-separated list. Raises InvalidInput for an unknown name."""
    names = text.split(",") if text else []
    if not set(names) <= set(allowed):
        raise InvalidInput("no such name", seen=text, allowed=", ".join(allowed))
    return names


def chosen_peers(text: str | None) -> list[str]:
    """Paceline and the peers of a list, or without a list all installed peers.

    Raises NotFound for a peer of the list that is not installed.
    """
    peers = [US]
    for name in list(PACKAGES) if text is None else chosen(text, tuple(PACKAGES)):
        try:
            python_of(name)
        except NotFound as error:
            if text is not None:
                raise
            say(str(error))
        else:
            peers.append(name)
    return peers


def decoding(model: Path, batches: Sequence[int], new_tokens: int) -> list[PeerCase]:
    """Greedy cases of every batch, and a sampled case of the largest batch.

    Prompts are parts of ARCHITECTURE.md. Raises InvalidInput if the text is too short.
    """
    text = (demo_folder().parents[1] / "ARCHITECTURE.md").read_text()
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    largest = max(batches)
    if len(tokens) < largest * PROMPT_TOKENS:
        most = len(tokens) // PROMPT_TOKENS
        raise InvalidInput("too few tokens for the batch", seen=largest, allowed=f"<= {most}")
    starts = range(0, largest * PROMPT_TOKENS, PROMPT_TOKENS)
    prompts = [tokens[start : start + PROMPT_TOKENS] for start in starts]
    cases = [PeerCase(f"batch {one}", prompts[:one], new_tokens) for one in batches]
    name = "batch {}, T {}, top-p {}".format(largest, *SAMPLED)
    return [*cases, PeerCase(name, prompts, new_tokens, *SAMPLED)]


def prefills(model: Path, lengths: Sequence[int]) -> list[PeerCase]:
    """A prompt of random tokens for every length, and one new token."""
    vocabulary = read_config(model).vocab_size
    return [PeerCase(f"prefill {n}", [random_prompt(n, vocabulary, n)], 1) for n in lengths]


async def in_turns(
    model: Path,
    dtype: str,
    names: Sequence[str],
    cases: Sequence[PeerCase],
    options: argparse.Namespace,
) -> list[tuple[RunningPeer, int]]:
    """Loads all peers, runs all turns, and returns every peer with its memory in MiB."""
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-peers-")))
        plan = {
            "model": str(model),
            "dtype": dtype,
            "threads": options.threads,
            "batch": max(len(case.prompts) for case in cases),
            "tokens": max(len(case.prompts[0]) + case.new_tokens for case in cases),
            "scratch": str(scratch),
        }
        peers = [await started(name, scratch, plan, stack) for name in names]
        for _ in range(options.busy):
            await stack.enter_async_context(answering("a busy process", BUSY))
        for turn in range(options.turns + 1):
            first = turn % len(peers)
            for case in cases:
                for peer in peers[first:] + peers[:first]:
                    await peer.run(case, turn)
            say(f"{dtype}: turn {turn} of {options.turns}" if turn else f"{dtype}: warm")
        for case in cases:
            rates = ", ".join(f"{one.name} {median(one.rates[case.name]):,.1f}" for one in peers)
            say(f"{dtype}, {case.name}: {rates} tokens/s")
        return [(peer, peer.memory_mib()) for peer in peers]


async def started(
    name: str, scratch: Path, plan: Mapping[str, Any], stack: AsyncExitStack
) -> RunningPeer:
    """Starts a peer with its model loaded; `stack` ends it. Raises NotFound, Unavailable,
    DeadlineExceeded.
    """
    python, log = python_of(name), scratch / f"{name}.log"
    command = (str(python), str(Path(__file__).with_name("sides.py")), name)
    environment = {"OMP_NUM_THREADS": str(plan["threads"]), "HF_HUB_OFFLINE": "1"}
    whole = child_environment(environment)
    if name == US:
        whole |= IMPORT_ENVIRONMENT  # as workers have
    else:
        whole.pop("PYTHONPATH", None)  # its packages are its environment's
    file = stack.enter_context(log.open("wb"))
    child = await stack.enter_async_context(answering(name, command, file, whole))
    peer = RunningPeer(name, child, log)
    say(f"{name} loads {plan['dtype']}")
    peer.versions = (await peer.ask("loading the model", LOAD_S, **plan))["versions"]
    return peer


def table(
    dtype: str, cases: Sequence[PeerCase], sides: Sequence[tuple[RunningPeer, int]]
) -> list[Row]:
    """Rows of one number format: tokens a second, ratios, memory, and equal greedy tokens."""
    ours, others = sides[0][0], [peer for peer, _ in sides[1:]]
    rows: list[Row] = []
    for case in cases:
        row = {"section": f"{dtype}, tokens/s", "case": case.name}
        row |= {one.name: f"{median(one.rates[case.name]):,.1f}" for one, _ in sides}
        for peer in others:
            ratio = paired_ratio(ours.rates[case.name], peer.rates[case.name])
            row[f"{US} / {peer.name}"] = str(ratio)
        rows.append(row)
    memory = {one.name: f"{mib:,}" for one, mib in sides}
    rows.append({"section": f"{dtype}, tokens/s", "case": "memory (PSS), MiB", **memory})
    for name, tokens in ours.greedy.items():
        equal = {one.name: _equal(tokens, one.greedy[name]) for one in others}
        total = sum(map(len, tokens))
        rows.append(
            {
                "section": f"{dtype}, greedy tokens equal to {US}'s before the first difference",
                "case": name,
                "tokens": total,
                **equal,
            }
        )
    return rows


def _equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Tokens of all sequences before their first difference."""
    pairs = [zip(one, two, strict=True) for one, two in zip(ours, theirs, strict=True)]
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], one))) for one in pairs)


def judged(
    dtype: str, cases: Sequence[PeerCase], sides: Sequence[tuple[RunningPeer, int]]
) -> list[Goal]:
    """Goals: no peer is faster in any case, and sampling costs a tenth at most."""
    ours, goals = sides[0][0].rates, list[Goal]()
    for case in cases:
        for peer, _ in sides[1:]:
            ratio = paired_ratio(ours[case.name], peer.rates[case.name])
            name = f"{dtype}, {case.name}, over {peer.name}:"
            goals.append(ratio_goal(name, NEVER_SLOWER, ratio, FEWEST_TURNS))
        if case.temperature:
            ratio = paired_ratio(ours[case.name], ours[f"batch {len(case.prompts)}"])
            name = f"{dtype}, {case.name}, over T 0:"
            goals.append(ratio_goal(name, SAMPLED_GOAL, ratio, FEWEST_TURNS))
    return goals


def markdown(result: BenchResult) -> str:
    """The tables of a page."""
    lines = [f"{result.title}. {result.date}, {result.machine}.", ""]
    lines += [f"- {name} {one}" for name, one in result.versions.items()]
    before: list[str] = []
    for row in result.rows:
        cells = {name: str(value) for name, value in row.items() if name != "section"}
        heading = [str(row["section"]), *cells]
        if heading[0] not in before[:1]:
            before = heading
            lines += ["", f"**{heading[0]}**", "", _line(cells), _line(["---"] * len(cells))]
        lines.append(_line([cells.get(name, "") for name in before[1:]]))
    words = {True: "met", False: "missed", None: "unresolved"}
    lines += ["", _line(["figure", "goal", "result"]), _line(["---"] * 3)]
    lines += [_line([one.name, str(one.goal), words[one.met]]) for one in result.goals]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str] | Mapping[str, str]) -> str:
    return f"| {' | '.join(cells)} |"
