"""`python -m benchmarks NAME [--json FILE] ...`: runs one bench and prints its table."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import uvloop

from paceline.errors import PacelineError

BENCHES = {
    "transport": "benchmarks.transport",
    "e2e": "benchmarks.e2e",
    "drafter": "benchmarks.drafter",
    "engine": "benchmarks.engine.run",
    "bandit": "benchmarks.bandit.run",
    "gateway": "benchmarks.gateway.run",
    "sglang": "benchmarks.sglang",
}
"""Name -> module with add_arguments(parser) and async run(options) -> BenchResult."""


def main() -> None:
    """Parses the command line and runs one bench; without a name prints what there is."""
    parser = argparse.ArgumentParser(
        prog="paceline bench", description="Benches, each by its name."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME")
    for name, module in BENCHES.items():
        one = names.add_parser(name, help=(import_module(module).__doc__ or "").partition("\n")[0])
        one.add_argument("--json", type=Path, help="also write the result to this file")
        import_module(module).add_arguments(one)
    options = parser.parse_args()
    if options.name is None:
        parser.print_help()
        return
    try:
        result = uvloop.run(import_module(BENCHES[options.name]).run(options))
    except PacelineError as error:
        raise SystemExit(f"bench {options.name}: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    result.print()
    if options.json is not None:
        result.write_json(options.json)


if __name__ == "__main__":
    main()
