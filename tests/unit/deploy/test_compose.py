"""The files of deploy/: every name in them exists, and nothing listens beyond this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import AddressesConfig

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
GIVEN = {"PACELINE_USER": "1000:1000", "GRAFANA_PASSWORD": "a", "REDIS_PASSWORD": "b"}
HAS_COMPOSE = (
    shutil.which("docker") is not None
    and subprocess.run(
        ["docker", "compose", "version"], capture_output=True, check=False
    ).returncode
    == 0
)


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read("compose.yaml")["services"]
    return found


def test_every_port_is_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    for name, one in services.items():
        assert all(str(port).startswith("127.0.0.1:") for port in one.get("ports", [])), name
    of_the_host = {name for name, one in services.items() if one.get("network_mode") == "host"}
    assert of_the_host == {"prometheus", "grafana"}
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert not any("ports" in services[name] for name in of_the_host)


def test_mounted_files_exist_and_are_read_only(services: dict[str, dict[str, Any]]) -> None:
    mounts = [mount for one in services.values() for mount in one.get("volumes", [])]
    of_the_tree = [mount.split(":") for mount in mounts if mount.startswith("./")]
    assert len(of_the_tree) == 4
    for source, _, mode in of_the_tree:
        assert (DEPLOY / source).exists(), source
        assert mode == "ro"


def test_no_password_has_a_default_or_stands_on_a_command_line(
    services: dict[str, dict[str, Any]],
) -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    for name in GIVEN:
        assert re.search(rf"\$\{{{name}:\?", text), name
    words = services["redis"]["command"]
    assert "requirepass" not in words[-1].partition("<<")[0]
    assert all(setting in words[-1] for setting in ("appendfsync always", "noeviction"))


def test_prometheus_asks_the_gateway_with_its_token_and_the_collector(
    services: dict[str, dict[str, Any]],
) -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yml")["scrape_configs"]}
    assert set(jobs) == {"gateway", "collector"}
    assert jobs["gateway"]["static_configs"][0]["targets"] == [AddressesConfig().http]
    where = jobs["gateway"]["authorization"]["credentials_file"]
    mounted = [mount for mount in services["prometheus"]["volumes"] if "/tokens:" in mount]
    assert where == f"{mounted[0].rsplit(':', 2)[1]}/agent"
    port = jobs["collector"]["static_configs"][0]["targets"][0]
    assert f"{port}:8889" in services["collector"]["ports"]
    assert read("otel-collector.yaml")["exporters"]["prometheus"]["endpoint"].endswith(":8889")


def relabelled(name: str, job: str) -> str | None:
    """Return Prometheus's name of a collector metric; None if the metric is dropped."""
    (collector,) = [
        one for one in read("prometheus.yml")["scrape_configs"] if one["job_name"] == "collector"
    ]
    labels = {"__name__": name, "job": job}
    for rule in collector["metric_relabel_configs"]:
        value = ";".join(labels[label] for label in rule["source_labels"])
        match = re.fullmatch(rule["regex"], value)
        if match is None:
            continue
        if rule.get("action") == "drop":
            return None
        labels[rule["target_label"]] = match.expand(rule["replacement"].replace("$", "\\"))
    return labels["__name__"]


def test_what_is_pushed_has_the_names_of_what_is_scraped_and_counts_once() -> None:
    assert relabelled("paceline_policy_figure_ratio", "policy_trainer") == "paceline_policy_figure"
    untouched = "paceline_coordinator_step_time_seconds_sum"
    assert relabelled(untouched, "coordinator") == untouched
    assert relabelled("paceline_engine_tokens_total", "gateway") is None


def test_the_collector_takes_otlp_and_hands_every_signal_on(
    services: dict[str, dict[str, Any]],
) -> None:
    config = read("otel-collector.yaml")
    assert "127.0.0.1:4317:4317" in services["collector"]["ports"]
    pipelines = config["service"]["pipelines"]
    assert set(pipelines) == {"metrics", "traces", "logs"}
    for pipeline in pipelines.values():
        assert set(pipeline["receivers"]) <= set(config["receivers"])
        assert set(pipeline["exporters"]) <= set(config["exporters"])
    assert config["exporters"]["otlp/jaeger"]["endpoint"].partition(":")[0] in services


def test_grafana_finds_its_sources_and_the_dashboard(services: dict[str, dict[str, Any]]) -> None:
    sources = read("grafana/provisioning/datasources/paceline.yaml")["datasources"]
    (provider,) = read("grafana/provisioning/dashboards/paceline.yaml")["providers"]
    mounts = dict(mount.rsplit(":", 2)[:2] for mount in services["grafana"]["volumes"])
    folders = {inside: DEPLOY / outside for outside, inside in mounts.items()}
    (dashboard,) = folders[provider["options"]["path"]].glob("*.json")
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.name}"
    used = {
        panel["datasource"]["uid"]
        for panel in json.loads(dashboard.read_text())["panels"]
        if "datasource" in panel
    }
    assert used == {"paceline-prometheus"} <= {source["uid"] for source in sources}
    assert {source["type"] for source in sources} == {"prometheus", "jaeger"}


@pytest.mark.skipif(not HAS_COMPOSE, reason="there is no docker compose on PATH")
def test_docker_compose_takes_the_file() -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        env={**os.environ, **GIVEN},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
