"""Prints lines of code and characters a line by package; fails on what is too long or named twice.

Exceptions are listed here by name, with a reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FUNCTION_LINES, FILE_LINES = 60, 400
PRODUCT_LINES = 48_108
ROOTS = ("libs", "services", "benchmarks", "examples")
PRODUCT = ("libs", "services")
GENERATED = ("/v1/",)
EXCEPTIONS: dict[str, str] = {}
CLASSES_IN = ("libs", "services", "benchmarks")
NAMED_TWICE = {
    "Session": "public noun of the client",
    "Task": "public noun of the client",
}


def code_lines(source: str) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - documented)


def excesses(path: Path, source: str) -> list[str]:
    """What in a file is longer than it may be."""
    found: list[str] = []
    lines = source.count("\n")
    if lines > FILE_LINES and str(path) not in EXCEPTIONS:
        found.append(f"{path}: {lines} lines; at most {FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{path}:{node.name}"
            if length > FUNCTION_LINES and name not in EXCEPTIONS:
                found.append(f"{name}: {length} lines; at most {FUNCTION_LINES}")
    return found


def named_twice(classes: Mapping[str, Sequence[Path]]) -> list[str]:
    """Names that two classes have; one noun is one class."""
    return [
        f"class {name} stands in {' and '.join(map(str, paths))}"
        for name, paths in classes.items()
        if len(paths) > 1 and name not in NAMED_TWICE
    ]


def package_of(path: Path) -> str:
    """A service, a folder of the library, or benchmarks or examples as one."""
    depth = {"services": 2, "libs": 3}.get(path.parts[0], 1)
    return "/".join(path.parts[:depth]) if len(path.parts) > depth else str(path.parent)


@dataclass
class Extent:
    """Of the files of a package; httpx has 22 characters a line, starlette 27."""

    code: int = 0
    lines: int = 0  # all, blank ones too
    characters: int = 0  # but white space

    def add(self, source: str) -> None:
        """One more file."""
        self.code += code_lines(source)
        self.lines += source.count("\n")
        self.characters += len(re.sub(r"\s", "", source))


def main() -> int:
    """Prints a line a package and every excess; returns 1 when there is one."""
    found: list[str] = []
    packages: dict[str, Extent] = {}
    classes: dict[str, list[Path]] = {}
    for root in ROOTS:
        for path in sorted(Path(root).rglob("*.py")):
            if any(generated in str(path) for generated in GENERATED):
                continue
            source = path.read_text(encoding="utf-8")
            packages.setdefault(package_of(path), Extent()).add(source)
            if root in PRODUCT:
                packages.setdefault("product", Extent()).add(source)
            found += excesses(path, source)
            for node in ast.walk(ast.parse(source)) if root in CLASSES_IN else ():
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append(path)
    found += named_twice(classes)
    product = packages["product"] = packages.pop("product", Extent())
    if product.code > PRODUCT_LINES:
        found.append(f"product: {product.code:,} lines of code; at most {PRODUCT_LINES:,}")
    for name, one in packages.items():
        mean = one.characters / max(1, one.lines)
        print(f"{name:32} {one.code:7,} lines of code  {mean:5.1f} characters a line")
    print("\n".join(found) or "every function and file within its budget, every noun one class")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
