"""Starts the command line, or names the extra that installs it."""

import importlib.util
import sys

from paceline.local.processes import EXIT_CONFIG


def main() -> None:
    """Runs `paceline`; exits with 2 if only the client is installed."""
    if importlib.util.find_spec("typer") is None:
        sys.exit(_without_command_line(sys.argv[1:]))
    from paceline.cli.main import app

    app()


def _without_command_line(arguments: list[str]) -> int:
    from importlib.metadata import version

    if arguments == ["--version"]:
        print(version("paceline"))
        return 0
    print(
        "paceline: the client is installed, the command line is not; "
        "pip install 'paceline[control]', or 'paceline[train]' for models and paceline demo",
        file=sys.stderr,
    )
    return EXIT_CONFIG


if __name__ == "__main__":
    main()
