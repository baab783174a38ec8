"""A process that holds part of a service on a host that is not the service's: it joins the service
whenever that is there.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from paceline.config import ServiceConfig, load_config
from paceline.errors import ConfigError, InvalidInput, PacelineError
from paceline.local.entry import run_part
from paceline.local.patience import patient
from paceline.telemetry import get_logger

CONNECT_S = 10.0
_AGAIN_S = 1.0
_log = get_logger(__name__)
C = TypeVar("C", bound=ServiceConfig)


async def hold_until(
    stop: asyncio.Event, hold: Callable[[float], Awaitable[None]], service: str
) -> None:
    """Awaits `hold`, given the seconds to connect in, again and again: it ends whenever the service
    is gone. Raises the ConfigError and InvalidInput with which the service does not take this host.
    """
    stopping = asyncio.create_task(stop.wait())
    said = ""
    try:
        while not stop.is_set():
            holding = asyncio.ensure_future(hold(patient(CONNECT_S)))
            await asyncio.wait({holding, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not holding.done():
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)
                return
            said = _heard(holding, service, said)
            await asyncio.wait({stopping}, timeout=_AGAIN_S)
    finally:
        stopping.cancel()


def _heard(holding: asyncio.Future[None], service: str, before: str) -> str:
    """Why the service is gone, told once; raises what another try cannot mend."""
    try:
        holding.result()
    except (ConfigError, InvalidInput):
        raise
    except PacelineError as error:
        if str(error) != before:
            _log.warning(f"{service}_away", error=str(error))
        return str(error)
    return ""


def check_number(host: int, hosts: tuple[int, ...], setting: str, owner: str, what: str) -> None:
    """Raises ConfigError for a host that a setting gives nothing to. `what`: it gives."""
    if not 1 <= host < len(hosts):
        raise ConfigError(
            f"{setting} gives no {what} to this host; host 0 is the {owner}'s own",
            seen=f"--host {host}, {setting}={list(hosts)}",
            allowed=f"1 to {len(hosts) - 1}" if len(hosts) > 1 else "",
        )


def run_held(
    module: str,
    name: str,
    config_class: type[C],
    section: str,
    serve: Callable[..., Awaitable[None]],
) -> None:
    """Runs `python -m <module> --host N` as the part `name` of the service with that section; the
    service's settings follow. `serve`: gets its settings, an event that stops it, and `host`.
    Leaves the process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", allow_abbrev=False)
    parser.add_argument("--host", type=int, required=True, help="its place among the hosts")
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    try:
        config = load_config(config_class, section, given.config, given.overrides)
    except PacelineError as error:
        parser.error(str(error))
    run_part(f"{name}{given.host}", config, partial(serve, host=given.host))
