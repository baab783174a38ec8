"""Tests of examples/ray without a cluster.

The manifests are checked against the schemas of KubeRay's resources. The script runs with
substitutes for the commands of Slurm and Ray, which record their arguments.
"""

from __future__ import annotations

import importlib
import os
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from paceline.cluster.nodes import check_room, pools_of
from paceline.config import SecurityConfig, ServiceConfig
from paceline.config.load import load_config
from paceline.local.patience import patient
from paceline.local.services import SERVICES
from paceline.rpc.security import check_security

ROOT = Path(__file__).parents[3]
RAY = ROOT / "examples" / "ray"
ELSEWHERE = "10.0.0.1:7400"
RUN = [
    ROOT / "examples/sglang/qwen2.5-7b-8gpus.toml",
    ROOT / "examples/asynchronous/16gpus_apart.toml",
]

# Schema of the example's fields in ray.io/v1 of KubeRay 1.5 to 1.7: a type, a dict of fields
# ("!" marks a required field), [schema of each element], a set of values, {str: schema}.
TEXTS: dict[Any, Any] = {str: str}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "env": [{"name!": str, "value": str, "valueFrom": {str: TEXTS}}],
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
    "resources": {"requests": TEXTS, "limits": TEXTS},
}
VOLUME = {
    "name!": str,
    "persistentVolumeClaim": {"claimName!": str},
    "configMap": {"name": str},
    "secret": {"secretName": str, "defaultMode": int},
    "emptyDir": {"medium": str},
}
TEMPLATE = {
    "spec!": {
        "securityContext": {str: int},
        "volumes": [VOLUME],
        "initContainers": [CONTAINER],
        "containers!": [CONTAINER],
    }
}
SPECS: Mapping[str, Any] = {
    "RayCluster": {
        "rayVersion": str,
        "authOptions": {"mode": {"disabled", "token"}},
        "headGroupSpec!": {"rayStartParams": TEXTS, "template!": TEMPLATE},
        "workerGroupSpecs": [
            {
                "groupName!": str,
                "replicas": int,
                "minReplicas!": int,
                "maxReplicas!": int,
                "rayStartParams": TEXTS,
                "template!": TEMPLATE,
            }
        ],
    },
    "RayJob": {
        "clusterSelector": TEXTS,
        "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
        "entrypoint": str,
    },
}


def misfits(value: Any, shape: Any, path: str) -> Iterator[str]:
    """Yield the places where a value does not fit its shape."""
    if isinstance(shape, type):
        if type(value) is not shape:
            yield f"{path}: {value!r} is no {shape.__name__}"
    elif isinstance(shape, set):
        if value not in shape:
            yield f"{path}: {value!r} is none of {shape}"
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            yield f"{path}: no list"
            return
        for index, one in enumerate(value):
            yield from misfits(one, shape[0], f"{path}[{index}]")
    elif not isinstance(value, dict):
        yield f"{path}: no table"
    elif str in shape:
        for name, one in value.items():
            yield from misfits(one, shape[str], f"{path}.{name}")
    else:
        fields = {name.rstrip("!"): one for name, one in shape.items()}
        required = {name[:-1] for name in shape if name.endswith("!")}
        yield from (f"{path}.{name} is absent" for name in required - value.keys())
        for name, one in value.items():
            if name not in fields:
                yield f"{path}.{name} is not known"
            else:
                yield from misfits(one, fields[name], f"{path}.{name}")


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    found = yaml.safe_load_all((RAY / "kuberay.yaml").read_text())
    return {one["kind"]: one for one in found}


def pods(resources: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specs of the head and of the workers."""
    spec = resources["RayCluster"]["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("kind", SPECS)
def test_a_manifest_has_the_fields_and_types_that_kuberay_requires(
    resources: dict[str, Any], kind: str
) -> None:
    one = resources[kind]
    assert one["apiVersion"] == "ray.io/v1"
    assert list(misfits(one["spec"], SPECS[kind], "spec")) == []
    wrong = {**one["spec"], "entryPoint": "x", "rayVersion": 2}
    assert any("entryPoint is not known" in said for said in misfits(wrong, SPECS[kind], "spec"))


def test_the_job_selects_the_cluster_whose_rays_are_all_of_one_version(
    resources: dict[str, Any],
) -> None:
    cluster, job = resources["RayCluster"], resources["RayJob"]["spec"]
    assert job["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    # KubeRay refuses these beside a selector
    assert not {"rayClusterSpec", "suspend", "backoffLimit", "ttlSecondsAfterFinished"} & job.keys()
    version = cluster["spec"]["rayVersion"]
    images = {one["image"] for pod in pods(resources) for one in pod["initContainers"]}
    assert images == {f"rayproject/ray:{version}"}
    assert tuple(map(int, version.split(".")[:2])) >= (2, 52)  # tokens


def test_every_volume_is_there_and_no_secret_is_written_down(resources: dict[str, Any]) -> None:
    for pod in pods(resources):
        named = {one["name"] for one in pod["volumes"]}
        both = (*pod["initContainers"], *pod["containers"])
        assert {mount["name"] for one in both for mount in one["volumeMounts"]} == named
        served = [mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]]
        assert "authority" not in served  # a holder of the authority's key can pose as anyone
        (main,) = pod["containers"]
        given = {one["name"]: one for one in main["env"]}
        for name in ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN", "REDIS_URL"):
            assert given[name]["valueFrom"]["secretKeyRef"]["name"] == "paceline-tokens"
        assert given["RAY_USE_TLS"]["value"] == "1"


def test_the_job_runs_up_with_settings_of_mounted_files(resources: dict[str, Any]) -> None:
    words = shlex.split(resources["RayJob"]["spec"]["entrypoint"])
    assert words[:6] == ["paceline", "up", "--launcher", "ray", "--address", "auto"]
    assert words[6::2] == ["--config"] * len(words[6::2])
    (head, _) = pods(resources)
    mounts = {PurePosixPath(one["mountPath"]) for one in head["containers"][0]["volumeMounts"]}
    files = [PurePosixPath(word) for word in words[7::2]]
    assert all(mounts & set(file.parents) for file in files)
    assert [file.name for file in files] == [file.name for file in RUN] + ["cluster.toml"]


def test_the_clusters_machines_have_room_for_the_pools_of_the_run(
    resources: dict[str, Any],
) -> None:
    gpus = resources["RayCluster"]["spec"]["workerGroupSpecs"][0]
    limits = gpus["template"]["spec"]["containers"][0]["resources"]["limits"]
    nodes = [{"GPU": float(limits["nvidia.com/gpu"])}] * gpus["replicas"]
    pools = pools_of(RUN, [])
    assert [pool.asks for pool in pools] == [{}, {"GPU": 8.0}, {"GPU": 8.0}]
    check_room(pools, nodes)


def services(files: list[Path], overrides: list[str] | None = None) -> list[ServiceConfig]:
    """The settings of every service."""
    found = []
    for one in SERVICES:
        if one.settings:
            module, _, name = one.settings.partition(":")
            cls = getattr(importlib.import_module(module), name)
            found.append(load_config(cls, one.name, files, overrides or []))
    return found


def check_beyond_loopback(security: SecurityConfig) -> None:
    """Check for the token, TLS and events' key that services on other machines require."""
    check_security(ELSEWHERE, security)
    assert security.tls_ca
    assert security.curve_key
    assert not security.allow_insecure


def test_the_clusters_settings_suit_every_service_beyond_loopback(
    resources: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "t")
    text = resources["ConfigMap"]["data"]["cluster.toml"]
    (tmp_path / "cluster.toml").write_text(text)
    for settings in services([*RUN, tmp_path / "cluster.toml"]):
        check_beyond_loopback(settings.security)
        assert settings.run.dir.startswith("/shared/")
    held = {one["mountPath"] for one in pods(resources)[0]["containers"][0]["volumeMounts"]}
    paths = [str(value) for value in tomllib.loads(text)["security"].values() if value]
    assert {str(PurePosixPath(path).parent) for path in paths} <= held


def openssl(*words: str | Path) -> str:
    done = subprocess.run(
        ["openssl", *map(str, words)],
        check=True,
        capture_output=True,
        text=True,
        timeout=patient(30),
    )
    return done.stdout


def test_a_pods_certificate_names_its_address_and_is_signed(
    resources: dict[str, Any], tmp_path: Path
) -> None:
    authority, tls = tmp_path / "authority", tmp_path / "tls"
    authority.mkdir()
    tls.mkdir()
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    files = ("-keyout", authority / "tls.key", "-out", authority / "tls.crt")
    openssl("req", "-x509", *key, "-subj", "/CN=a", *files)
    (shell, flags, script) = pods(resources)[0]["initContainers"][0]["command"]
    script = script.replace("/etc/paceline/tls", str(tls)).replace("/authority", str(authority))
    environment = {**os.environ, "POD_IP": "10.1.2.3"}
    subprocess.run(
        [shell, flags, script],
        env=environment,
        check=True,
        capture_output=True,
        timeout=patient(30),
    )
    openssl("verify", "-CAfile", tls / "ca.crt", tls / "tls.crt")
    shown = openssl("x509", "-in", tls / "tls.crt", "-noout", "-checkip", "10.1.2.3")
    assert "does match" in shown
    assert stat.S_IMODE((tls / "tls.key").stat().st_mode) & 0o007 == 0


# ---- Slurm

STAND_IN = """#!/bin/bash
name=${0##*/}
words=$(printf '\\t%s' "$@")
printf '%s%s\\n' "$name" "$words" >> "$NOTES"  # at once: several run at a time
case "$name $*" in
  "scontrol show hostnames"*) printf 'n1\\nn2\\nn3\\n' ;;
  srun*--nodelist=n1*"hostname --ip-address") echo 10.0.0.1 ;;
  srun*"hostname --ip-address") printf '10.0.0.3\\n10.0.0.1\\n10.0.0.2 192.168.0.2\\n' ;;
  srun*"python3 -c"*)  # nodes are up once Ray has been started on them
    if [ -n "$NODES_MISSING" ]; then exit 1; fi
    until (($(grep -c $'\\tstart\\t' "$NOTES") >= (${!#} > 1 ? 2 : 1))); do sleep 0.05; done ;;
  srun*"paceline up"*) env > "$NOTES.env" ;;
esac
"""


def submit(folder: Path, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the script with substitutes for its commands; they record their arguments in `notes`."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for name in ("srun", "scontrol", "ray", "paceline"):
        (stand_ins / name).write_text(STAND_IN)
        (stand_ins / name).chmod(0o755)
    (stand_ins / "python3").symlink_to(sys.executable)
    environment = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "REDIS_URL": "rediss://:secret@redis:6379",
        **given,
    }
    return subprocess.run(
        ["bash", RAY / "slurm.sbatch", *words],
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )


def noted(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "notes").read_text().splitlines()]


def launched(folder: Path) -> list[str]:
    """The step that runs `paceline up`."""
    (found,) = (line for line in noted(folder) if "up" in line)
    return found


def test_the_script_is_bash_and_asks_for_whole_nodes() -> None:
    script = RAY / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=patient(30))
    asked = [line.split()[1] for line in script.read_text().splitlines() if "#SBATCH" in line]
    assert "--exclusive" in asked
    assert "--ntasks-per-node=1" in asked


def test_ray_starts_on_the_first_node_then_on_the_others_then_up(tmp_path: Path) -> None:
    done = submit(tmp_path, "--config", "run.toml", "coordinator.steps=3")
    assert done.returncode == 0, done.stderr
    starts = [set(line) for line in noted(tmp_path) if "start" in line]
    (head,) = (line for line in starts if "--head" in line)
    (others,) = (line for line in starts if "--head" not in line)
    assert {"--nodelist=n1", "--node-ip-address=10.0.0.1", "--port=6379", "--num-gpus=8"} <= head
    assert {"--nodes=2", "--exclude=n1", "--address=10.0.0.1:6379"} <= others
    up = launched(tmp_path)
    words = up[up.index("paceline") :]
    assert words[:6] == ["paceline", "up", "--launcher", "ray", "--address", "10.0.0.1:6379"]
    assert words[6:9] == ["--config", "run.toml", "coordinator.steps=3"]


def test_the_jobs_settings_suit_every_service_beyond_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit(tmp_path).returncode == 0
    lines = (tmp_path / "notes.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if "=" in line)
    assert len(given["PACELINE_TOKEN"]) == len(given["PACELINE_AGENT_TOKEN"]) == 64
    assert (given["RAY_USE_TLS"], given["RAY_AUTH_MODE"]) == ("1", "token")
    monkeypatch.setenv("PACELINE_TOKEN", given["PACELINE_TOKEN"])
    up = launched(tmp_path)
    overrides = [word for word in up if word.startswith(("run.", "security."))]
    shared = tmp_path / "paceline-7"
    for settings in services([], overrides):
        security = settings.security
        check_beyond_loopback(security)
        assert settings.run.dir == str(shared / "run")
        for path in (security.tls_cert, security.tls_key, security.tls_ca, security.curve_key):
            assert stat.S_IMODE(Path(path).stat().st_mode) & 0o077 == 0
    openssl("verify", "-CAfile", shared / "tls/ca.crt", shared / "tls/tls.crt")
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "192.168.0.2", "127.0.0.1"):
        shown = openssl("x509", "-in", shared / "tls/tls.crt", "-noout", "-checkip", address)
        assert "does match" in shown
    assert not (shared / "tls/ca.key").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"REDIS_URL": ""}, "a Redis that all nodes reach"),
        ({"SLURM_JOB_NODELIST": ""}, "this is a script for sbatch"),
        ({"NODES_MISSING": "1", "WAIT_S": "-1"}, "not 1 nodes of Ray in -1 s"),
    ],
)
def test_what_is_missing_is_said_before_up(
    tmp_path: Path, given: dict[str, str], said: str
) -> None:
    done = submit(tmp_path, **given)
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "notes.env").exists()
