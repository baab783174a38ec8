"""Fails on old dialect in prose, on a missing decision record and on too many of them.

It also prints figures that have no limit: files, settings, source files of a commit.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pointers import tracked
from sizes import GENERATED, PRODUCT

MARKERS_PER_1000, RECORDS = 5.0, 40
COMMITS, ADDED_LINES = 30, 80
MARKERS = (
    "what|who|whose|whom|whoever|ones|those|others|one_that|of_these|of_them|say|says|said|tell|tells"
    "|told|know|knows|known|ask|asks|asked|hear|hears|heard|stand|stands|lies|comes|came|goes_on|go_on"
)
MARKER = re.compile(rf"\b(?:{MARKERS})\b".replace("_", r"\s+"), re.IGNORECASE)
CODE_IN_PAGE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
RECORD_NUMBERS = re.compile(r"\bADRs?[\s-]+(\d+(?:(?:,|,? and)\s+\d+)*)")
RECORD_FILES = re.compile(r"(?:\badr/|\]\()(\d{4}(?:-[a-z][a-z0-9-]*)?)(?![\w-])")
NO_PROSE = ("CHANGELOG.md", "docs/adr/", "benchmarks/results/", "docs/protos.md", "docs/cli.md")
"""History, and pages that are generated from code."""
INVENTED = ("tests/unit/test_ci.py", "tests/unit/test_site.py")
"""Tests that name records of temporary trees."""


def words_of(source: str) -> str:
    """The docstrings and comments of a module."""
    expressions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    values = (node.value for node in expressions if isinstance(node.value, ast.Constant))
    strings = [value.value for value in values if isinstance(value.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*strings, *(t.string for t in tokens if t.type == tokenize.COMMENT)])


def markers_per_1000(texts: Iterable[str]) -> float:
    """Marker words per 1,000 words of the texts."""
    markers = words = 0
    for text in texts:
        markers += len(MARKER.findall(text))
        words += len(re.findall(r"\w+", text))
    return 1000 * markers / max(1, words)


def dialect(kind: str, texts: Mapping[str, str]) -> list[str]:
    """Prints the figure of a kind of prose; returns a line with the worst files if it is high."""
    density = markers_per_1000(texts.values())
    print(f"{kind}: {density:.1f} marker words per 1,000 words; at most {MARKERS_PER_1000:g}")
    if density <= MARKERS_PER_1000:
        return []
    counts = {name: len(MARKER.findall(text)) for name, text in texts.items()}
    worst = sorted(counts, key=lambda name: -counts[name])[:10]
    named = ", ".join(f"{name} ({counts[name]})" for name in worst if counts[name])
    return [f"{kind}: {density:.1f} marker words per 1,000 words; most of them in {named}"]


def missing_records(name: str, text: str, records: Sequence[str]) -> list[str]:
    """A line for each decision record that a text names and that does not exist."""
    numbers = {int(record[:4]) for record in records}
    cited = {int(n) for run in RECORD_NUMBERS.findall(text) for n in re.findall(r"\d+", run)}
    files = set(RECORD_FILES.findall(text))
    absent = [f"ADR {number}" for number in sorted(cited - numbers)]
    for file in sorted(files - set(records)):
        if "-" in file or int(file) not in numbers:
            absent.append(f"docs/adr/{file}")
    return [f"{name}: {record} does not exist" for record in absent]


def files_per_commit() -> list[int]:
    """The number of hand-written source files of each recent large commit, sorted.

    The oldest commits of a shallow clone are left out: git counts the whole tree as added there.
    """
    shallow = Path(git("rev-parse", "--git-path", "shallow").strip())
    cut = set(shallow.read_text().split()) if shallow.is_file() else set()
    log = git("log", "--no-merges", "--numstat", "-M", "--format=@%H", "-n", "600", "--", *PRODUCT)
    counts: list[int] = []
    for commit in log.split("@")[1:]:
        head, *rows = commit.split("\n")
        changes = [row.split("\t") for row in rows if row.endswith(".py")]
        changes = [c for c in changes if not any(part in c[2] for part in GENERATED)]
        if head not in cut and sum(int(c[0]) for c in changes) >= ADDED_LINES:
            counts.append(len(changes))
    return sorted(counts[:COMMITS])


def git(*arguments: str) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Prints the figures and every fault; returns 1 when there is one."""
    texts: dict[str, str] = {}
    for name in tracked():
        if name.endswith((".py", ".md", ".toml", ".proto")):
            texts[name] = Path(name).read_text(encoding="utf-8")
    code = {n: words_of(t) for n, t in texts.items() if n.endswith(".py") and n.startswith(PRODUCT)}
    code = {n: t for n, t in code.items() if not any(part in n for part in GENERATED)}
    pages = {n: t for n, t in texts.items() if n.endswith(".md") and not n.startswith(NO_PROSE)}
    pages = {name: CODE_IN_PAGE.sub(" ", text) for name, text in pages.items()}
    found = dialect("docstrings and comments", code) + dialect("pages", pages)
    records = [Path(n).stem for n in texts if re.match(r"docs/adr/\d{4}-", n)]
    if len(records) > RECORDS:
        found.append(f"docs/adr: {len(records)} decision records; at most {RECORDS}")
    for name, text in texts.items():
        found += missing_records(name, text, records) if name not in INVENTED else []
    settings = len(re.findall(r"^\| `", texts.get("docs/settings.md", ""), re.MULTILINE))
    print(f"{len(code)} files, {settings} settings, {len(records)} decision records")
    counts = files_per_commit()
    median, p90 = (counts[int(len(counts) * share)] if counts else 0 for share in (0.5, 0.9))
    print(
        f"{len(counts)} commits of {ADDED_LINES} added lines: {median} files (median), {p90} (p90)"
    )
    print("\n".join(found) or "plain prose, and every decision record that is named exists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
