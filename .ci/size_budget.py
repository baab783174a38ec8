"""Fails when a function or a file is longer than the budget. Exceptions are listed here by name, with a reason."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

FUNCTION_LINES, FILE_LINES, TOTAL_LINES = 60, 400, 40_000
ROOTS = ("libs", "services", "examples")
EXCEPTIONS: dict[str, str] = {}


def code_lines(source: str) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - documented)


def main() -> int:
    """Prints every excess; returns 1 when there is one."""
    excess: list[str] = []
    total = 0
    for root in ROOTS:
        for path in sorted(Path(root).rglob("*.py")):
            if "/v1/" in str(path):
                continue
            source = path.read_text(encoding="utf-8")
            lines = source.count("\n")
            total += code_lines(source)
            if lines > FILE_LINES and str(path) not in EXCEPTIONS:
                excess.append(f"{path}: {lines} lines; at most {FILE_LINES}")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    name = f"{path}:{node.name}"
                    if length > FUNCTION_LINES and name not in EXCEPTIONS:
                        excess.append(f"{name}: {length} lines; at most {FUNCTION_LINES}")
    if total > TOTAL_LINES:
        excess.append(f"all code: {total} lines; at most {TOTAL_LINES}")
    print("\n".join(excess) or f"{total} lines of code in all, every function and file within its budget")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
