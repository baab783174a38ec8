"""The Grafana dashboard queries existing metrics and labels under their Prometheus names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paceline.services.coordinator.metrics import figures_of
from paceline.telemetry.metrics import Metric, use_meter
from paceline.v1.coordinator_pb2 import StepRecord

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy/grafana/dashboards/paceline.json"
PROMTOOL = shutil.which("promtool")
OF_PROMETHEUS = {"le", "job", "instance"}
"""Labels that no metric declares."""


def declared() -> list[Metric]:
    """Every metric of every module that declares some."""
    found: dict[str, Metric] = {}
    libs = ROOT / "libs"
    owners = (
        "paceline/services/*/metrics.py",
        "paceline/*/metrics.py",
        "paceline/rpc/server_calls.py",
    )
    for pattern in owners:
        for path in sorted(libs.glob(pattern)):
            name = ".".join(path.relative_to(libs).with_suffix("").parts)
            each = vars(import_module(name)).values()
            found |= {one.name: one for one in each if isinstance(one, Metric)}
    return list(found.values())


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels of every metric by the name of each of its samples, as GET /metrics has them."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    use_meter(MeterProvider([reader]))
    for metric in declared():
        metric.record(1, **dict.fromkeys(metric.labels, "x"))
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return {one.name: set(one.labels) for family in families for one in family.samples}


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


@pytest.fixture(scope="module")
def targets(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [target for panel in panels for target in panel.get("targets", [])]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bpaceline_\w+", expression))


def labels_in(expression: str) -> set[str]:
    """Labels that an expression groups by or chooses."""
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    chosen = re.findall(r"[{,](\w+)(?:=~|!=|!~|=)", expression)
    return {label.strip() for labels in grouped for label in labels.split(",")} | set(chosen)


def test_every_panel_asks_for_metrics_that_exist(
    targets: list[dict[str, Any]], exported: dict[str, set[str]]
) -> None:
    assert len(targets) > 50
    for target in targets:
        assert names_in(target["expr"]), target
        assert names_in(target["expr"]) <= set(exported), target["expr"]


def test_labels_of_expressions_and_legends_are_those_of_their_metrics(
    targets: list[dict[str, Any]], exported: dict[str, set[str]]
) -> None:
    for target in targets:
        known = set.union(*(exported[name] for name in names_in(target["expr"]))) | OF_PROMETHEUS
        assert labels_in(target["expr"]) <= known, target["expr"]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= known, target
        if grouped := re.findall(r"\bby \(([^)]*)\)", target["expr"]):
            assert shown <= {one.strip() for one in ",".join(grouped).split(",")}, target


def test_counters_are_shown_as_rates_or_as_totals_of_what_should_not_happen(
    panels: list[dict[str, Any]], exported: dict[str, set[str]]
) -> None:
    plain = {
        name
        for panel in panels
        for target in panel.get("targets", [])
        for name in names_in(target["expr"])
        if name.endswith("_total") and "rate(" not in target["expr"]
    }
    kinds = (
        "damaged",
        "refused",
        "not_finite",
        "dead",
        "restarts",
        "alarms",
        "skipped",
        "decisions",
    )
    assert {name for name in plain if not any(kind in name for kind in kinds)} == set()


def test_every_service_is_on_the_dashboard(targets: list[dict[str, Any]]) -> None:
    shown = {name.split("_")[1] for target in targets for name in names_in(target["expr"])}
    assert shown == {one.name.split(".")[1] for one in declared()}


def test_figures_of_the_policy_are_those_that_it_reports(targets: list[dict[str, Any]]) -> None:
    reported = set(re.findall(r"`(\w+)`", (ROOT / "docs/algorithms.md").read_text()))
    for target in targets:
        for names in re.findall(r'policy_figure.figure=~?"([^"]+)"', target["expr"]):
            assert {name.removesuffix(".*") for name in names.split("|")} <= reported, names


def test_figures_of_the_last_step_are_those_that_the_coordinator_records(
    targets: list[dict[str, Any]],
) -> None:
    record = StepRecord(response_length_quantiles=[5, 9, 11], groups_solved={"by_all": 1})
    figures, shown = figures_of(record), 0
    for target in targets:
        for names in re.findall(r'coordinator_figure.figure=~?"([^"]+)"', target["expr"]):
            assert all(any(re.fullmatch(one, name) for name in figures) for one in names.split("|"))
            shown += 1
    assert shown


def test_brackets_close_and_panels_do_not_overlap(
    panels: list[dict[str, Any]], targets: list[dict[str, Any]]
) -> None:
    for target in targets:
        for opening, closing in ("()", "[]", "{}"):
            assert target["expr"].count(opening) == target["expr"].count(closing), target["expr"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    areas = [panel["gridPos"] for panel in panels]
    for one, other in combinations(areas, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(area["x"] + area["w"] <= 24 for area in areas)


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on PATH")
def test_prometheus_takes_every_expression_and_its_configuration(
    targets: list[dict[str, Any]], tmp_path: Path
) -> None:
    exprs = [target["expr"].replace("$__rate_interval", "1m") for target in targets]
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    file = tmp_path / "rules.json"  # which is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    config = str(ROOT / "deploy/prometheus.yml")
    for words in (["rules", str(file)], ["config", "--syntax-only", config]):
        command = [str(PROMTOOL), "check", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
