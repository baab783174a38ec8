"""Waits until servers are healthy; exits with 0, or with 1 after the timeout.

`python -m paceline.local.healthcheck --address HOST:PORT | --redis ROLE... [--config FILE]`. It
serves readiness probes and start scripts that depend on Redis.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from paceline.config import SecurityConfig, ServiceConfig
from paceline.config.load import load_config
from paceline.errors import PacelineError
from paceline.local.redis import Role, resolved, wait_redis
from paceline.rpc import wait_healthy


async def check(
    address: str, roles: Sequence[Role], files: Sequence[Path], timeout_s: float
) -> None:
    """Returns when the server, or each Redis role, is healthy. Raises PacelineError with the reason
    after `timeout_s` seconds.
    """
    if address:
        await wait_healthy(address, SecurityConfig(), timeout_s)
    else:
        redis = resolved(load_config(ServiceConfig, "local", files)).redis
        urls = {redis.durable_url if role == "durable" else redis.features for role in roles}
        await asyncio.gather(*(wait_redis(url, timeout_s) for url in urls))


def main(argv: Sequence[str] | None = None) -> int:
    """Checks one server, or some Redis roles of a run."""
    parser = argparse.ArgumentParser(prog="python -m paceline.local.healthcheck")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--address", default="", help="host:port of a gRPC server")
    where.add_argument(
        "--redis",
        choices=get_args(Role),
        action="append",
        default=[],
        help="role, of the run that --config has; once or more",
    )
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS")
    words = parser.parse_args(argv)
    try:
        asyncio.run(check(words.address, words.redis, words.config, words.timeout))
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
