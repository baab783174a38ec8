"""Fails on a pointer in code or docs to a file that does not exist.

A pointer is a path that ends in .py, .proto, .toml or .md; it is right when a file's path ends in
it. Decision records are history and are not read.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

READ = (".py", ".md", ".toml", ".proto", ".ci/mutants")
POINTER = re.compile(
    r"(?<![\w./*<{$-])(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.(?:py|proto|md|toml))(?![\w*(])"
)
OTHERS = re.compile(r"DESIGN\b")
EXCEPTIONS = {
    "file.py": "stands for a user's file",
    "mine.py": "stands for a user's file",
    "path/to/file.py": "stands for a user's file",
    "mine.toml": "stands for a user's file",
    "paceline.toml": "what paceline init writes",
    "first.toml": "what paceline init writes in the tutorial",
    "agents.toml": "stands for a user's file",
    "medusa.py": "stands for a user's file",
    "path/to/medusa.py": "stands for a user's file",
    "adaptive_spec_params.py": "SGLang's",
    "config.toml": "a run's own",
    "candidate.py": "written into a sandbox",
    "tests.py": "written into a sandbox",
}
"""Names that stand for a file of the reader's or of another project."""


def tracked() -> list[str]:
    """Every file of the checkout, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if Path(name).is_file()]


def main() -> int:
    """Prints a line a wrong pointer; returns 1 when there is one."""
    names = tracked()
    endings = {"/".join(Path(name).parts[i:]) for name in names for i in range(name.count("/") + 1)}
    wrong = []
    for name in names:
        skipped = (
            name.startswith(("docs/adr/", "benchmarks/results/", "tests/", "libs/paceline/v1/"))
            or "/v1/" in name
        )
        if (
            skipped
            or not name.endswith(READ)
            or name in (".ci/pointers.py", ".ci/site_pages.py", "CHANGELOG.md")
        ):
            continue
        for number, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), 1):
            found = [p for p in POINTER.findall(line) if p not in endings and p not in EXCEPTIONS]
            wrong += [f"{name}:{number}: no file {pointer}" for pointer in found]
            wrong += [f"{name}:{number}: names no file: {word}" for word in OTHERS.findall(line)]
    print("\n".join(wrong) or "every pointer to a file is right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
