"""A run's directory and config, and that every service takes the demo's settings."""

from __future__ import annotations

import importlib
import json
import stat
from pathlib import Path

import pytest

from paceline.cli.access import directory_of
from paceline.cli.command import settings_of
from paceline.cli.run_files import (
    DemoOptions,
    RunFiles,
    configure_run,
    differing,
    find_run,
    parse_override,
    repository_root,
)
from paceline.config import ServiceConfig
from paceline.config.load import load_config, read_tables
from paceline.errors import ConfigError, InvalidInput, NotFound
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.services.rollout_gateway.workers.local import engine_settings

SERVICES = {
    "coordinator": ("paceline.services.coordinator.config", "CoordinatorConfig"),
    "gateway": ("paceline.services.rollout_gateway.config", "GatewayConfig"),
    "policy_trainer": ("paceline.services.policy_trainer.config", "PolicyTrainerConfig"),
    "drafter_trainer": ("paceline.services.drafter_trainer.config", "DrafterTrainerConfig"),
}


def prepare_run(options: DemoOptions) -> RunFiles:
    """A run as `paceline demo` makes it."""
    files = find_run(options)
    configure_run(files, options)
    return files


def load(section: str, *paths: Path) -> ServiceConfig:
    module, name = SERVICES[section]
    return load_config(getattr(importlib.import_module(module), name), section, paths)


@pytest.mark.parametrize("section", SERVICES)
def test_every_service_takes_the_demos_settings(section: str, tmp_path: Path) -> None:
    load(section, repository_root() / "examples/demo/demo.toml")
    assert load(section, prepare_run(DemoOptions(out=tmp_path)).config).run.id == "demo-0-1"


@pytest.mark.parametrize("section", SERVICES)
def test_every_service_takes_the_settings_for_gpus(section: str) -> None:
    examples = repository_root() / "examples/sglang"
    load(section, examples / "qwen2.5-7b-8gpus.toml")
    load(section, examples / "qwen3-30b-a3b.toml")


@pytest.mark.parametrize(
    ("run", "laid_over"),
    [
        ("demo/demo.toml", "asynchronous/fully_async.toml"),
        ("sglang/qwen2.5-7b-8gpus.toml", "asynchronous/8gpus_apart.toml"),
        ("sglang/qwen2.5-7b-8gpus.toml", "asynchronous/16gpus_apart.toml"),
    ],
)
def test_asynchronous_settings_are_laid_over_a_runs_own(run: str, laid_over: str) -> None:
    examples = repository_root() / "examples"
    for section in SERVICES:
        config = load(section, examples / run, examples / laid_over)
        if isinstance(config, CoordinatorConfig):
            assert (config.schedule, config.policy_lag) == ("fully_async", 2)


def test_the_demo_on_sglang_has_arms_of_one_speculator(tmp_path: Path) -> None:
    gateway = prepare_run(DemoOptions(out=tmp_path, engine="sglang")).read_config()["gateway"]
    assert gateway["engine"]["kind"] == "sglang"
    served = SGLangSpec.model_validate(engine_settings(GatewayConfig.model_validate(gateway)))
    assert {arm.partition(":")[0] for arm in served.arm_names} == {"off", "eagle"}


def test_runs_are_numbered_and_own_their_ports(tmp_path: Path) -> None:
    first, second = (prepare_run(DemoOptions(out=tmp_path, seed=3, steps=7)) for _ in range(2))
    assert (first.run_id, second.run_id) == ("demo-3-1", "demo-3-2")
    a, b = first.read_config(), second.read_config()
    assert (a["run"]["seed"], a["coordinator"]["steps"]) == (3, 7)
    ports = [address.rsplit(":")[-1] for tree in (a, b) for address in tree["addresses"].values()]
    assert len(set(ports)) == len(ports)
    assert a["telemetry"]["spans_dir"] == str(first.spans)


def test_paths_of_the_examples_exist_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = prepare_run(DemoOptions(out=tmp_path)).read_config()
    for section, key in (
        ("coordinator", "tasks_path"),
        ("gateway", "model"),
        ("policy_trainer", "model"),
    ):
        assert Path(tree[section][key]).is_absolute()
        assert Path(tree[section][key]).exists()


def test_without_speculation_nothing_drafts_and_nothing_is_trained(tmp_path: Path) -> None:
    tree = prepare_run(DemoOptions(out=tmp_path, speculation=False)).read_config()
    assert tree["gateway"]["drafter"] == "off"
    assert tree["gateway"]["speculation"]["arms"] == ["off"]
    assert tree["coordinator"]["drafter_enabled"] is False
    assert tree["policy_trainer"]["push_head"] is False


def test_a_frozen_drafter_is_served_and_not_trained(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        prepare_run(DemoOptions(out=tmp_path, frozen_drafter=drafter))
    (drafter / "config.json").write_text(json.dumps({}))
    tree = prepare_run(DemoOptions(out=tmp_path, frozen_drafter=drafter)).read_config()
    assert tree["gateway"]["drafter"] == str(drafter)
    assert tree["coordinator"]["drafter_enabled"] is False
    with pytest.raises(ConfigError, match="exclude"):
        prepare_run(DemoOptions(out=tmp_path, frozen_drafter=drafter, speculation=False))


def test_a_resumed_run_keeps_its_settings_and_takes_more_steps(tmp_path: Path) -> None:
    overrides = ("coordinator.prompts_per_step=4", "run.seed=9")
    files = prepare_run(DemoOptions(out=tmp_path, steps=3, speculation=False, overrides=overrides))
    resumed = prepare_run(DemoOptions(out=tmp_path, steps=8, resume=files.run_id))
    tree = resumed.read_config()
    assert resumed == files
    assert (
        tree["coordinator"]["steps"],
        tree["coordinator"]["prompts_per_step"],
        tree["run"]["seed"],
    ) == (8, 4, 9)
    assert tree["gateway"]["drafter"] == "off"


@pytest.mark.parametrize("run_id", ["demo-9-9", "../demo-0-1", ""])
def test_resuming_an_unknown_run_names_the_known_ones(tmp_path: Path, run_id: str) -> None:
    prepare_run(DemoOptions(out=tmp_path))
    with pytest.raises(NotFound, match="demo-0-1"):
        prepare_run(DemoOptions(out=tmp_path, resume=run_id))


def test_overrides_name_their_section() -> None:
    assert parse_override("gateway.engine.threads=2") == {"gateway": {"engine": {"threads": 2}}}
    assert parse_override("run.dir=a b") == {"run": {"dir": "a b"}}
    for wrong in ("engine.threads=2", "gateway=1", "gateway.model", "gatway.model=x"):
        with pytest.raises(ConfigError, match="names its section"):
            parse_override(wrong)


def test_an_own_redis_is_used_and_its_password_is_for_the_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:6379/1")
    files = prepare_run(DemoOptions(out=tmp_path))
    assert set(files.read_config()["redis"].values()) == {"redis://:secret@127.0.0.1:6379/1"}
    assert stat.S_IMODE(files.config.stat().st_mode) == 0o600


def test_absent_examples_are_told_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.__file__", str(tmp_path / "site-packages/paceline/__init__.py"))
    with pytest.raises(NotFound, match="clone of the repository"):
        prepare_run(DemoOptions(out=tmp_path))


def test_settings_survive_the_file(tmp_path: Path) -> None:
    files = prepare_run(DemoOptions(out=tmp_path, overrides=('gateway.model="odd \\"name\\" ü"',)))
    assert read_tables(files.config)["gateway"]["model"] == 'odd "name" ü'
    assert isinstance(files, RunFiles)


def test_a_run_without_a_name_is_that_of_its_settings_which_are_noted_once(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", tmp_path / "mine.toml"
    settings.write_text(f"[run]\nid = 'mine'\ndir = '{run}'\n[gateway]\nmodel = 'm'\n")
    with pytest.raises(NotFound, match="this run has not begun"):
        directory_of(None, [settings])
    run.mkdir()
    assert directory_of(None, [settings]) == run
    noted = read_tables(run / "config.toml")
    assert (noted["run"]["id"], noted["gateway"]["model"]) == ("mine", "m")
    settings.write_text(f"[run]\nid = 'other'\ndir = '{run}'\n")
    assert directory_of(None, [settings]) == directory_of(str(run), []) == run
    assert read_tables(run / "config.toml") == noted


@pytest.mark.parametrize("both", [True, False])
def test_a_run_is_named_or_its_settings_are_given(both: bool, tmp_path: Path) -> None:
    given = ("demo-0-1", [tmp_path / "mine.toml"]) if both else (None, [])
    with pytest.raises(InvalidInput, match="which run"):
        directory_of(*given)


def test_two_runs_differ_by_their_settings_and_not_by_their_places() -> None:
    here = {
        "run": {"id": "a", "dir": "runs/a", "seed": 1},
        "addresses": {"http": "127.0.0.1:1"},
        "policy_trainer": {"optimizer": {"lr": 1e-5}, "model": "m"},
    }
    there = {
        "run": {"id": "b", "dir": "runs/b", "seed": 1},
        "addresses": {"http": "127.0.0.1:2"},
        "policy_trainer": {"model": "m"},
        "coordinator": {"later": {"100": {"tasks_path": "t.jsonl"}}},
    }
    assert differing(here, there) == [
        ("coordinator.later.100.tasks_path", "default", "t.jsonl"),
        ("policy_trainer.optimizer.lr", "1e-05", "default"),
    ]
    assert differing(here, here) == []


def test_a_tracker_named_on_the_command_line_becomes_a_setting(tmp_path: Path) -> None:
    settings = settings_of(["coordinator.steps=3"], no_token=False, trackers=["tensorboard"])
    files = prepare_run(DemoOptions(out=tmp_path, overrides=settings))
    config = load_config(CoordinatorConfig, "coordinator", [files.config])
    assert (config.trackers, config.steps) == (("tensorboard",), 3)
    assert settings_of(None, no_token=False) == ()
