"""`paceline up`: Redis and all services from one TOML, supervised in this terminal.

Knows no demo.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.cli.supervise import event_line, stop_all, supervise
from paceline.config import ServiceConfig, load_config
from paceline.local.child import ChildEvent
from paceline.local.supervisor import Supervisor, run_launches

EXIT_INTERRUPTED = 130


async def run_up(files: Sequence[Path], overrides: Sequence[str], console: Console) -> int:
    """Start and supervise everything until the run ends (0) or Ctrl-C (130). Leaves no process.

    Raises ConfigError for settings that cannot work and Unavailable, with the end of its log, for a
    service that fails.
    """
    config = load_config(ServiceConfig, "local", files, overrides)

    def show(event: ChildEvent) -> None:
        console.print(event_line(event), highlight=False)

    launches = run_launches(config, [path.absolute() for path in files], overrides)
    supervisor = Supervisor(launches, Path(config.run.dir), on_event=show)

    async def started() -> None:
        console.print(
            f"[bold]everything serves[/]: API http://{config.addresses.http}/v1, "
            f"coordinator {config.addresses.coordinator}; logs in "
            f"{Path(config.run.dir) / 'logs'}. Ctrl-C stops all.",
            highlight=False,
        )

    try:
        finished = await supervise(supervisor, started)
    finally:
        await stop_all(supervisor)
    if not finished:
        console.print(
            "stopped; the run continues from its journal with the same command", highlight=False
        )
    return 0 if finished else EXIT_INTERRUPTED
