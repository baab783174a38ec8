"""Joins the metrics pages of several processes, with a label for the process."""

from __future__ import annotations

import re
from collections.abc import Mapping

LABEL = "replica"
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?P<labels>.*)\})? (?P<value>.+)")


def merged_metrics(pages: Mapping[str, bytes]) -> str:
    """One page in Prometheus's text format. It describes each family once. Every sample has the
    name of its page as LABEL.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for page_name, page in pages.items():
        family, known = "", frozenset(heads)
        for line in page.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if family not in known:
                    heads.setdefault(family, []).append(line)
                samples.setdefault(family, [])
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (found["labels"], f'{LABEL}="{page_name}"')))
                labelled = f"{found['name']}{{{labels}}} {found['value']}"
                samples.setdefault(family, []).append(labelled)
    lines = [line for family in samples for line in (*heads.get(family, ()), *samples[family])]
    return "\n".join(lines) + "\n"
