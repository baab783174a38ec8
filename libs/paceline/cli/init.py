"""Writes the settings of a new run: `paceline init`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.cli import plan, run_files
from paceline.errors import ConfigError
from paceline.local.checks import check_reading
from paceline.tasks import open_tasks
from paceline.whole_files import write_whole

_TEMPLATE = """\
# A run of Paceline: paceline up --config {file}
# docs/settings.md lists every setting and its default.
[run]
id = {id}
dir = {dir}                   # journal, checkpoints, logs and report; a run resumes from here
seed = 0

[telemetry]
spans_dir = {spans}           # source of the report's latencies and trace

[coordinator]
steps = 100                   # RL steps
{tasks}
prompts_per_step = 16         # tasks per step
samples_per_task = 8          # samples per task: the group size
training_interval_steps = 1   # RL steps between two trainings of the drafter
min_workers_for_training = 1

[coordinator.sampling]
temperature = 1.0
max_tokens = 512
{judged}
[gateway]
model = {model}
drafter = "eagle"             # fresh weights; or off, ngram, a directory

[gateway.engine]
kind = "embedded"             # or "sglang", on GPUs: make setup-sglang
workers = {workers}           # one per slot: a GPU, on CPU a core
threads = 1
max_batch = 32                # concurrent sequences per worker
max_sequence_tokens = 1024    # prompt and response together

[policy_trainer]
model = {model}
threads_per_rank = 1

[policy_trainer.algorithm]
name = "grpo"                 # docs/algorithms.md has ten

[policy_trainer.optimizer]
lr = 1e-6

[drafter_trainer]
model = {model}
drafter = "eagle"
ranks = 1
threads_per_rank = 1
"""
_OWN_TASKS = """\
tasks_path = {tasks}
{heldout}
reward = {reward}       # of paceline.services.rollout_gateway.rewards, or package.module:rule"""
_AGENT = """\
environment = "external"      # agents bring the tasks: docs/agents.md
reward = "agent"              # the agent posts the reward"""
_CLAIMED = """\
environment = "external"      # agents claim the tasks: docs/agents.md
tasks_path = {tasks}
{heldout}
reward = {reward}       # for samples without an agent's reward; "agent": none"""
_JUDGED = """
[coordinator.evaluation]      # the gateway runs the held-out tasks
environment = "single_turn"
reward = {reward}
"""


def write_settings(
    file: Path,
    model: str,
    *,
    tasks: Path | None,
    heldout: Path | None,
    reward: str,
    workers: int,
    agents: bool = False,
    say: Callable[[str], None] = print,
) -> plan.Checked:
    """Writes a commented TOML for a run that trains this model, and returns the run's plan.

    `model`: a directory or a Hub id. `agents`: external agents claim the tasks, or bring their own
    without `tasks`. `say` receives progress lines of downloads.

    Raises ConfigError if the file exists or the settings cannot work, TaskFileError if tasks cannot
    be read.
    """
    if file.exists():
        raise ConfigError("this file is there already", seen=file, allowed="another name")
    for path in filter(None, (tasks, heldout)):
        open_tasks(path)
    name = file.stem
    values = {
        "id": name,
        "dir": f"runs/{name}",
        "spans": f"runs/{name}/spans",
        "model": model,
    }
    quoted = {key: _quoted(value) for key, value in values.items()}
    claimed = agents and tasks is not None
    text = _TEMPLATE.format(
        file=file,
        tasks=_tasks(_CLAIMED if claimed else _OWN_TASKS, tasks, heldout, reward),
        judged=_JUDGED.format(reward=_quoted(_judge(reward))) if claimed else "",
        workers=workers,
        **quoted,
    )
    write_whole(file, text)
    try:
        models = run_files.found_models([file], [], say)
        checked = plan.plan_run([file], models)
        found = next((one.partition("=")[2] for one in models), model)
        return checked._replace(lines=[*checked.lines, *check_reading(Path(found))])
    except ConfigError:
        file.unlink()
        raise


def _tasks(template: str, tasks: Path | None, heldout: Path | None, reward: str) -> str:
    if tasks is None:
        return _AGENT
    held = f"heldout_path = {_quoted(str(heldout))}" if heldout else "# heldout_path = ..."
    return template.format(tasks=_quoted(str(tasks)), heldout=held, reward=_quoted(reward))


def _judge(reward: str) -> str:
    """Reward rule of the held-out tasks, which agents never see."""
    return "math_answer" if reward == "agent" else reward


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
