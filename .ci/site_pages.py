"""Prepares docs/ for mkdocs, as a hook of mkdocs.yml.

Adds the pages that lie at the root of the tree and the list of decisions, puts pages that nav does
not name under "More", and turns links to files that are no pages into their names.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "DEVELOPERS.md": "developers.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the tree -> page of the site."""
DECISIONS = "adr/index.md"
INDEX = "README.md"
"""The index of docs/ for readers of the tree; the site has its nav instead."""
UNLESS_ABSENT = {"tutorial.md"}
"""Pages that nav names and a tree may lack."""
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^ *(```|~~~)")


def on_config(config: Any) -> Any:
    """Mermaid's diagrams; and a nav with what there is."""
    from pymdownx.superfences import fence_code_format

    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    drawn = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    fences["custom_fences"] = [drawn]
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != INDEX)
    config.nav = complete_nav(config.nav, pages)
    return config


def complete_nav(nav: list[Any], pages: Iterable[str]) -> list[Any]:
    """The nav without optional pages that are absent, and with those that it does not name."""
    there = set(pages)
    kept = without(nav, UNLESS_ABSENT - there)
    more = sorted(there - set(pages_of(kept)))
    return [*kept, {"More": more}] if more else kept


def without(nav: list[Any], absent: set[str]) -> list[Any]:
    """The nav less these pages."""
    kept: list[Any] = []
    for entry in nav:
        ((title, value),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(value, list):
            kept.append({title: without(value, absent)})
        elif value not in absent:
            kept.append(entry)
    return kept


def pages_of(nav: list[Any]) -> list[str]:
    """Pages that a nav names."""
    found: list[str] = []
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages_of(value) if isinstance(value, list) else [value]
    return found


def on_files(files: Any, config: Any) -> Any:
    """The pages that are made here."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in FROM_ROOT.items()}
    made[DECISIONS] = decisions_page()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def decisions_page() -> str:
    """Every record by number, with its title."""
    lines = ["# Decisions", "", "What was decided and why, in the order of time.", ""]
    for path in sorted((ROOT / "docs/adr").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        number, _, words = title.partition(" ")
        lines.append(f"- {number} [{words}]({path.name})")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page with links that hold on the site."""
    uri = page.file.src_uri
    origin = next((name for name, made in FROM_ROOT.items() if made == uri), f"docs/{uri}")
    known = {file.src_uri for file in files}
    return with_links(markdown, lambda target: target_on_site(target, origin, uri, known))


def with_links(markdown: str, resolve: Callable[[str], str | None]) -> str:
    """The text with every link's target resolved, code left as it is; None leaves its words."""

    def replaced(match: re.Match[str]) -> str:
        target = resolve(match["target"])
        if target is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({target})"

    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else LINK.sub(replaced, line))
    return "\n".join(lines) + "\n"


def target_on_site(target: str, origin: str, uri: str, known: set[str]) -> str | None:
    """Where a link of the file `origin` of the tree, which is the page `uri`, leads on the site.

    None where that is no page: a file of the tree.
    """
    path, anchor, part = target.partition("#")
    if "://" in target or not path or target.startswith("mailto:"):
        return target
    in_tree = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    if in_tree == "docs/adr":
        page = DECISIONS
    else:
        page = (
            FROM_ROOT.get(in_tree) or str(PurePosixPath(in_tree).relative_to("docs"))
            if (in_tree in FROM_ROOT or in_tree.startswith("docs/"))
            else ""
        )
    if page not in known:
        return None
    return os.path.relpath(page, posixpath.dirname(uri) or ".") + anchor + part
