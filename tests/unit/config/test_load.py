"""Reading settings: precedence, unknown keys, values that do not fit."""

import math
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from paceline.config import Config, ServiceConfig, known_keys
from paceline.config.load import load_config
from paceline.errors import ConfigError
from paceline.services.coordinator.config import EvaluationConfig
from paceline.services.drafter_trainer.config import OfflineConfig
from paceline.trajectory import TEMPERATURE


class EngineConfig(Config):
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: int = Field(default=1, ge=1)
    arms: tuple[str, ...] = ("off",)


class GatewayConfig(ServiceConfig):
    engine: EngineConfig = EngineConfig(threads=3)
    spare: EngineConfig | None = None
    release_after_s: float = 2.0
    costs: dict[str, float] = Field(default={"off": 1.0})


def load(*overrides: str, files: tuple[Path, ...] = ()) -> GatewayConfig:
    return load_config(GatewayConfig, "gateway", files, overrides)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_hold_when_nothing_is_given() -> None:
    assert load() == GatewayConfig()


def test_later_files_win_over_earlier_and_overrides_over_files(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.toml",
        '[run]\nid="a"\nseed=1\n[gateway]\nrelease_after_s=1\n[gateway.engine]\nthreads=5',
    )
    second = write(tmp_path / "b.toml", '[run]\nseed=2\n[gateway.engine]\ndtype="float32"')
    config = load("engine.arms=['off', 'eagle:5_1_6']", "run.id=c", files=(first, second))
    assert (config.run.id, config.run.seed, config.release_after_s) == ("c", 2, 1.0)
    assert config.engine == EngineConfig(dtype="float32", threads=5, arms=("off", "eagle:5_1_6"))


def test_one_key_keeps_the_rest_of_a_default_node_and_of_a_default_table() -> None:
    config = load("engine.dtype=float32", "costs.ngram=0.5")
    assert config.engine == EngineConfig(dtype="float32", threads=3)
    assert config.costs == {"off": 1.0, "ngram": 0.5}


def test_sections_of_other_services_are_left_to_them(tmp_path: Path) -> None:
    path = write(
        tmp_path / "all.toml", "[policy_trainer]\nnobody_knows_me_here=1\n[coordinator]\nx=2"
    )
    assert load("policy_trainer.learning_rate=1", files=(path,)) == GatewayConfig()


def test_an_override_may_begin_with_the_services_own_section() -> None:
    assert load("gateway.release_after_s=9").release_after_s == 9.0


def test_a_services_section_may_hold_a_shared_section_for_itself(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.toml",
        '[telemetry]\nlog_level="error"\n[gateway.telemetry]\nlog_level="debug"',
    )
    assert load(files=(path,)).telemetry.log_level == "debug"


@pytest.mark.parametrize("text", ["007", "2026-01-01", "1e3", "true", "'quoted'"])
def test_a_text_setting_takes_an_override_as_it_is_written(text: str) -> None:
    assert load(f"run.dir={text}").run.dir == text.strip("'")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("engine.dtyp=1", "engine.dtype"),
        ("dtype=float32", "engine.dtype"),
        ("release_after=1", "release_after_s"),
        ("security.token=abc", "security.token_env"),
        ("gateway.engine.thread=1", "engine.threads"),
        ("spare.thread=1", "spare.threads"),
    ],
)
def test_an_unknown_key_fails_with_the_override_and_the_nearest_key(
    override: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert f"override {override}" in str(caught.value)
    assert f"nearest: {nearest};" in str(caught.value)


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "typo.toml", "[gateway.engine]\nthreds = 2")
    with pytest.raises(
        ConfigError,
        match=r"typo\.toml: gateway has no setting engine\.threds; nearest: engine\.threads",
    ):
        load(files=(path,))


def test_an_unknown_section_fails_with_the_nearest_one(tmp_path: Path) -> None:
    path = write(tmp_path / "typo.toml", "[gatway]\nx = 2")
    with pytest.raises(ConfigError, match="unknown section; nearest: gateway; seen: gatway"):
        load(files=(path,))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "engine.threads=many",
            ["engine.threads", "override engine.threads=many", "valid integer", "'many'"],
        ),
        ("engine.threads=0", ["engine.threads", "greater than or equal to 1", "seen: 0"]),
        ("engine.dtype=fp8", ["engine.dtype", "'float32' or 'bfloat16'", "'fp8'"]),
        ("run.id=A B", ["run.id", "[a-z0-9-]{1,64}", "'A B'"]),
        ("engine=3", ["engine", "seen: 3"]),
    ],
)
def test_a_value_that_does_not_fit_names_key_value_and_what_is_allowed(
    override: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert [part for part in said if part not in str(caught.value)] == []


def test_all_misfits_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load("engine.threads=0", "run.seed=-1")
    assert "engine.threads" in str(caught.value)
    assert "run.seed" in str(caught.value)


@pytest.mark.parametrize("override", ["run.seed", "=1", "run..seed=1", "run seed=1"])
def test_an_override_that_is_no_assignment_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        load(override)


def test_files_that_are_missing_or_not_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*absent\.toml"):
        load(files=(tmp_path / "absent.toml",))
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML.*line 2"):
        load(files=(write(tmp_path / "broken.toml", "[run]\nid = = 1"),))
    with pytest.raises(ConfigError, match="run is a section, not a value"):
        load(files=(write(tmp_path / "flat.toml", "run = 1"),))


def test_a_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().engine.threads = 2  # type: ignore[misc]


def test_known_keys_are_all_dotted_leaves() -> None:
    keys = known_keys(GatewayConfig)
    assert [
        key
        for key in keys
        if not key.startswith(("run.", "redis.", "telemetry.", "security.", "addresses."))
    ] == [
        "costs",
        "engine.arms",
        "engine.dtype",
        "engine.threads",
        "release_after_s",
        "spare.arms",
        "spare.dtype",
        "spare.threads",
    ]


@pytest.mark.parametrize("seen", [1e-30, 10.5, math.nan, math.inf])
@pytest.mark.parametrize(
    ("kind", "needed"),
    [(EvaluationConfig, {}), (OfflineConfig, {"data": "d", "model": "m"})],
    ids=["evaluation", "offline"],
)
def test_a_temperature_that_is_no_drawable_one_is_refused_with_the_range(
    kind: type[Config], needed: dict[str, str], seen: float
) -> None:
    for drawable in (0, TEMPERATURE.low, 10):
        kind.model_validate({**needed, "temperature": drawable})
    with pytest.raises(ValidationError, match="temperature"):
        kind.model_validate({**needed, "temperature": seen})
    if 0 < seen < 1:
        with pytest.raises(ValidationError, match=f"{TEMPERATURE}: a smaller one overflows"):
            kind.model_validate({**needed, "temperature": seen})
