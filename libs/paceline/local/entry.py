"""Starts and ends a service process: arguments, config, telemetry, signals, exit status."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import uvloop
from rich.console import Console

from paceline import telemetry
from paceline.config import ServiceConfig
from paceline.config.load import load_config, print_config
from paceline.errors import ConfigError, PacelineError, ResourceExhausted, RunFailed
from paceline.local import checks, news, ports, processes, redis, services, tokens
from paceline.processor import keep_freed_memory

_STATUSES = {
    ConfigError: processes.EXIT_CONFIG,
    RunFailed: processes.EXIT_RUN_FAILED,
    ResourceExhausted: processes.EXIT_FULL,
}

C = TypeVar("C", bound=ServiceConfig)
Serve = Callable[[C, asyncio.Event], Awaitable[None]]


def run_service(
    name: str,
    config_class: type[C],
    serve: Serve[C],
    *,
    extra: str = "",
    numbered: Callable[[C, int], C] | None = None,
) -> None:
    """Runs one service until it ends or a signal stops it; then exits the process.

    `extra`: the extra that must be installed (checks.py). `numbered`: the settings of one process
    of a service with several processes; its number is the option --<name>.

    Exit status: 0 when serve() returned, 128 + signal after SIGTERM or SIGINT, 2 for a config
    error. 3 when the run failed, 4 when memory or disk is full, 1 for any other Paceline error. An
    error is printed as one line on stderr.
    """

    processes.die_with_parent()
    processes.keep_files_private()
    try:
        arguments = _parse_arguments(name, numbered=numbered is not None)
        if extra and not arguments.print_config:
            checks.require_extra(extra, name)
        code = _run(name, config_class, serve, arguments, numbered)
    except (PacelineError, ExceptionGroup) as raised:
        error = _only_error(raised)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"{name}: {error}", style="red", markup=False)
        codes = (code for kind, code in _STATUSES.items() if isinstance(error, kind))
        code = next(codes, processes.EXIT_FAILED)
    raise SystemExit(code)


def _only_error(raised: PacelineError | ExceptionGroup[Exception]) -> PacelineError:
    """The error to show to the user, unwrapped from task groups.

    Re-raises a group that contains other errors.
    """
    while isinstance(raised, ExceptionGroup):
        first = raised.exceptions[0]
        if raised.split(PacelineError)[1] is not None or not isinstance(
            first, PacelineError | ExceptionGroup
        ):
            raise raised
        raised = first
    return raised


def _parse_arguments(name: str, *, numbered: bool) -> argparse.Namespace:
    program = f"python -m {services.service(name).module}"
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    option = parser.add_argument
    option("--config", type=Path, action="append", default=[], metavar="FILE", help="TOML")
    option("--print-config", action="store_true", help="print the whole configuration and exit")
    option("overrides", nargs="*", metavar="key=value", help="settings that outrank the files")
    if numbered:
        option(f"--{name}", type=int, default=0, metavar="N", help="its number")
    return parser.parse_intermixed_args()


def _run(
    name: str,
    config_class: type[C],
    serve: Serve[C],
    arguments: argparse.Namespace,
    numbered: Callable[[C, int], C] | None,
) -> int:
    config = load_config(config_class, name, arguments.config, arguments.overrides)
    if arguments.print_config:
        sys.stdout.write(print_config(config, name))
        return processes.EXIT_FINISHED
    config, process = redis.resolved(config), name
    if numbered and (number := getattr(arguments, name)):
        config, process = numbered(config, number), f"{name}-{number}"
    with processes.owned(Path(config.run.dir), process):
        spec = services.service(process)
        for key in filter(None, (spec.address_key, *spec.more_address_keys)):
            ports.require_free(config.addresses.of(key), f"addresses.{key}")
        tokens.use_run_tokens(config)
        keep_freed_memory()
        telemetry.setup(process, config.telemetry)
        # The token for each address: the agents' token for HTTP, else the operators'.
        security, of = config.security, config.addresses.of
        known = {of(spec.address_key): security.token} if spec.address_key else {}
        known |= {of(key): security.agent_token or security.token for key in spec.links}
        try:
            with tokens.announced(known):
                stopped_by = uvloop.run(_serve_until_signal(config, serve))
        finally:
            telemetry.shutdown()
    return 128 + stopped_by if stopped_by else processes.EXIT_FINISHED


async def _serve_until_signal(config: C, serve: Serve[C]) -> int:
    """Runs serve(). Returns the number of the signal that stopped it, or 0."""
    stop, received = asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def note_signal(number: int) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note_signal, number)
    turning = asyncio.create_task(news.report_turns(config.run.hung_s))
    try:
        await serve(config, stop)
    finally:
        turning.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):
                loop.remove_signal_handler(number)
    return received[0] if received else 0
