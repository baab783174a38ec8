"""`python -m paceline.bench NAME [--json FILE] ...`: runs one bench and prints its table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import uvloop

from paceline.errors import PacelineError

BENCHES = {
    "transport": "paceline.bench.transport",
    "e2e": "paceline.bench.e2e",
    "drafter": "paceline.bench.drafter",
}
"""Name -> module with add_arguments(parser) and async run(options) -> BenchResult."""


def main(benches: Mapping[str, str] = BENCHES, program: str = "paceline.bench") -> None:
    """Parses the command line and runs; a service's benches pass their own table."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description="Benches, each by its name."
    )
    names = parser.add_subparsers(dest="name", required=True)
    for name, module in benches.items():
        one = names.add_parser(name, help=(import_module(module).__doc__ or "").partition("\n")[0])
        one.add_argument("--json", type=Path, help="also write the result to this file")
        import_module(module).add_arguments(one)
    options = parser.parse_args()
    try:
        result = uvloop.run(import_module(benches[options.name]).run(options))
    except PacelineError as error:
        raise SystemExit(f"bench {options.name}: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    result.print()
    if options.json is not None:
        result.write_json(options.json)


if __name__ == "__main__":
    main()
