"""Arms that need no training, and the bandit over them, with the pretrained model of examples/real:
on chat, and on a text to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.engine.runs import Workload, rate_ratio, take_turns, workload
from benchmarks.engine.sections import (
    OFF,
    Extent,
    Findings,
    chosen,
    equality_goal,
    forced,
    judged,
    speed_rows,
)
from benchmarks.result import Goal, Row
from benchmarks.start_drafters import REAL
from paceline.cli.run_files import merged
from paceline.errors import NotFound

ARMS = ("self:2_1_3", "self:4_1_5", "ngram:4_1_5")
MOST_TOKENS, SEQUENCE_TOKENS = 64, 512
GAIN_GOAL, GAIN_BATCHES, HINDSIGHT_GOAL = 1.3, (1, 4), 0.97
"""Bandit over `off`, batch sizes of that goal, and bandit over the best arm."""
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a fox and a river.",
    "How do I boil an egg?",
    "List the planets of the solar system.",
    "What is photosynthesis?",
    "Give me tips for learning Python.",
    "What is the difference between rain and snow?",
    "What are the benefits of exercise?",
)


async def pretrained(plan: Extent) -> Findings:
    """Measures each number format, task and batch size. Raises NotFound without the model."""
    folder = _model()
    rows, goals, exact = list[Row](), list[Goal](), list[Row]()
    for dtype in ("float32", "bfloat16"):
        changes = {
            "drafter": "self",
            "dtype": dtype,
            "arms": (OFF, *ARMS),
            "max_sequence_tokens": SEQUENCE_TOKENS,
        }
        engine = plan.engine(str(folder), **changes)
        bandits = plan.bandit_engines(str(folder), **changes)
        first = next(iter(bandits))
        for name, prompts in _prompts(str(folder)).items():
            for batch in plan.batches:
                what = f"{name}, {dtype}"
                work = _work(prompts, batch, min(plan.max_tokens, MOST_TOKENS))
                ways = forced(engine, work, plan.threads, (OFF, *ARMS))
                ways |= chosen(bandits, work, plan.threads)
                runs = await take_turns(ways, plan.few, f"{what}, batch {batch}")
                found = speed_rows(what, batch, runs)
                rows += found
                exact += found if dtype == "float32" else []
                best = max((OFF, *ARMS), key=lambda arm: sum(one.rate for one in runs[arm]))
                if batch in GAIN_BATCHES:
                    gain = rate_ratio(runs[first], runs[OFF])
                    goals.append(judged(f"{what}, batch {batch}: bandit / off", GAIN_GOAL, gain))
                ratio = rate_ratio(runs[first], runs[best])
                title = f"{what}, batch {batch}: bandit / best arm, {best}"
                goals.append(judged(title, HINDSIGHT_GOAL, ratio))
    return Findings(rows, [*goals, equality_goal("float32", exact)])


def _model() -> Path:
    folder = Path(merged([REAL], [])["gateway"]["model"]).expanduser()
    if not (folder / "config.json").is_file():
        raise NotFound("no model here", seen=folder, allowed="python examples/real/fetch_model.py")
    return folder


def _work(prompts: Sequence[tuple[int, ...]], batch: int, tokens: int) -> Workload:
    """Greedy requests: whole waves of the prompts, at least one."""
    wanted = [prompts[i % len(prompts)] for i in range(max(batch, 2))]
    return workload(wanted, batch, tokens, greedy=True, ignore_eos=True)


def _prompts(folder: str) -> dict[str, list[tuple[int, ...]]]:
    """Prompts of each task, in the model's chat format."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {
        "chat": QUESTIONS,
        "copying": [
            f"Repeat this text word for word:\n{' '.join(QUESTIONS[i:] + QUESTIONS[:i])}"
            for i in range(len(QUESTIONS))
        ],
    }
    return {name: [_tokens(tokenizer, text) for text in some] for name, some in texts.items()}


def _tokens(tokenizer: Any, question: str) -> tuple[int, ...]:
    asked = [{"role": "user", "content": question}]
    found = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    return tuple(found)
