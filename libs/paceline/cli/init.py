"""Writes the settings of a new run: `paceline init`."""

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from paceline.cli import plan, run_files
from paceline.config import load
from paceline.errors import ConfigError
from paceline.local.checks import check_reading
from paceline.tasks.file import TaskFile
from paceline.whole_files import write_whole

_TEMPLATE = Path(__file__).with_name("run.toml")


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
        TaskFile(path)
    markup = Environment(  # noqa: S701  the result is TOML
        trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    markup.filters["quote"] = load.toml_value
    template = markup.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    paths = {"tasks": tasks and str(tasks), "heldout": heldout and str(heldout)}
    given = {"model": model, "reward": reward, "workers": workers, "agents": agents}
    write_whole(file, template.render(file=file, name=file.stem, **paths, **given))
    try:
        models = run_files.found_models([file], [], say)
        checked = plan.plan_run([file], models)
        found = next((one.partition("=")[2] for one in models), model)
        return checked._replace(lines=[*checked.lines, *check_reading(Path(found))])
    except ConfigError:
        file.unlink()
        raise
