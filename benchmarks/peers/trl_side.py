"""TRL's GRPO trainer in a process of its own, by the Python of its environment.

The first JSON line of the input describes the run: {"model", "tasks", "dtype", "threads", "steps",
"prompts", "samples", "new_tokens", "seed", "scratch"}; tasks is a file of JSON lines with "prompt",
a list of messages, and "answer", a number. Its answer is {"versions"}. Each further line asks for
one step, answered by {"step_s", "tokens", "reward"}: seconds of the step, response tokens, and the
mean reward. Errors end the process. The trainer's own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import import_module
from importlib.metadata import version
from time import perf_counter
from typing import Any

PACKAGES = ("trl", "transformers", "torch")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score_number(completions: Any, answer: Any, **_: Any) -> list[float]:
    """1 for a completion whose last number is the answer, else 0."""
    texts = [one[0]["content"] for one in completions]
    found = [_NUMBER.findall(text)[-1:] for text in texts]
    return [float(one == [right]) for one, right in zip(found, answer, strict=True)]


def trainer_of(plan: dict[str, Any]) -> Any:
    """The trainer, with transformers' generation and one optimiser step for all samples of a step.

    dtype: float32, bfloat16 (weights and optimiser too), or mixed (bfloat16 products of float32
    weights).
    """
    trl, torch = import_module("trl"), import_module("torch")
    torch.set_num_threads(plan["threads"])
    with open(plan["tasks"], encoding="utf-8") as lines:
        tasks = import_module("datasets").Dataset.from_list([json.loads(line) for line in lines])
    mixed = plan["dtype"] == "mixed"
    settings = trl.GRPOConfig(
        output_dir=plan["scratch"],
        max_steps=plan["steps"],
        per_device_train_batch_size=plan["prompts"] * plan["samples"],
        num_generations=plan["samples"],
        max_completion_length=plan["new_tokens"],
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=mixed,
        use_cpu=True,
        seed=plan["seed"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32" if mixed else plan["dtype"]},
    )
    return trl.GRPOTrainer(
        model=plan["model"], reward_funcs=score_number, args=settings, train_dataset=tasks
    )


def serve(plan: dict[str, Any], answers: Any) -> None:
    """Trains a step for each line of the input, until the input ends or all steps are done."""

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    class StepByLine(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        """Waits for a line before a step, and answers after the step's log."""

        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                sys.exit()
            self.began = perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, **said: Any) -> None:
            logs = said["logs"]
            if "reward" in logs:
                tokens = logs["completions/mean_length"] * plan["prompts"] * plan["samples"]
                took = perf_counter() - self.began
                send({"step_s": took, "tokens": tokens, "reward": logs["reward"]})

    trainer = trainer_of(plan)
    trainer.add_callback(StepByLine())
    send({"versions": {one: version(one) for one in PACKAGES}})
    trainer.train()


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.stdin.readline()), own)
