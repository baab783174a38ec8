"""Prints the critical path of a step: `paceline why`."""

from rich.console import Console
from rich.table import Table

from paceline.cli import access, run_files
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.report.why import explain

_LEAST_SHARE = 0.005
"""Parts below this share of the step are left out."""


def show_why(run: str, step: int | None, console: Console) -> None:
    """Prints the main cause and the parts of a step; None: of the slowest step.

    Raises NotFound for an absent run or step.
    """
    config = load_config(ServiceConfig, "local", [access.run_directory(run) / "config.toml"])
    found = explain(run_files.files_of(config).spans, step)
    console.print(found.cause, highlight=False, markup=False)
    table = Table("edge", "span")
    beside = (f"median of {found.peers}", "more") if found.peers else ()
    for name in ("s", "share", *beside):
        table.add_column(name, justify="right")
    for part in found.parts:
        if part.seconds >= _LEAST_SHARE * found.seconds:
            cells = [f"{part.seconds:.3f}", f"{part.seconds / found.seconds:.1%}"]
            if part.median_s is not None:
                cells += [f"{part.median_s:.3f}", f"{part.more_s:+.3f}"]
            table.add_row(part.edge, part.name, *cells)
    console.print(table)
