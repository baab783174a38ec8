"""The Dockerfile as far as it can be judged without an engine; where there is one, it builds."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("client", "cpu", "cuda")
Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """Every instruction and the rest of its line, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip())
        for word, _, rest in (one.partition(" ") for one in joined.splitlines())
    ]


def stages() -> dict[str, list[Instruction]]:
    """Stage -> its instructions, the base first."""
    found: dict[str, list[Instruction]] = {}
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found.setdefault(name, [])
            rest = base
        current.append((word, rest))
    return found


def ignored(path: str) -> bool:
    """Return whether .dockerignore leaves a path out: the last pattern that matches decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        candidates = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if "**/" in line:
            candidates = list(parts)
        if any(
            fnmatch(one, pattern) and one.count("/") == pattern.count("/") for one in candidates
        ):
            out = not line.startswith("!")
    return out


def test_every_base_is_another_stage_or_an_image_with_a_full_version() -> None:
    for stage in stages().values():
        base = stage[0][1]
        assert base in stages() or re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+", base), base


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    for name, stage in stages().items():
        for word, rest in stage:
            if word != "COPY":
                continue
            *sources, _ = rest.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages(), name
                continue
            assert sources
            for source in sources:
                assert (ROOT / source).exists(), source
                assert not ignored(source), source


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        "libs/.env.local",
        ".git/config",
        ".venv/bin/python",
        "runs/demo-0-1/tokens/operator",
        "examples/openai_agent/agent.py",
        "services/coordinator/__pycache__/server.cpython-311.pyc",
    ],
)
def test_nothing_secret_or_made_reaches_the_builder(path: str) -> None:
    assert ignored(path)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_without_rights_and_holds_no_secret(target: str) -> None:
    stage = stages()[target]
    users = [rest for word, rest in stage if word == "USER"]
    assert users == ["paceline"]
    after = [word for word, _ in stage[stage.index(("USER", "paceline")) :]]
    assert "RUN" not in after
    for word, rest in stage:
        if word in ("ARG", "ENV"):
            assert not re.search(r"token|secret|password|key", rest, re.IGNORECASE)


def test_the_extras_that_images_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"(?:\.whl\)|paceline)\[([a-z0-9,]+)\]", (ROOT / "Dockerfile").read_text())
    assert len(named) == 2
    for extras in named:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def engine_answers() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_image_of_the_client_builds_and_imports_it() -> None:
    if not engine_answers():
        pytest.skip("no Docker engine answers")
    tag = "paceline-client:test"
    subprocess.run(["docker", "build", "--target", "client", "-t", tag, "."], cwd=ROOT, check=True)
    code = "import paceline.client, os; assert os.getuid() == 10001"
    subprocess.run(["docker", "run", "--rm", tag, "python", "-c", code], check=True)
