"""A printed tree loads back to an equal tree and hides secrets."""

import string
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from paceline.config import Config, RedisConfig, RunConfig, ServiceConfig
from paceline.config.load import load_config, print_config, read_tables, write_tables

SECTION = "policy_trainer"


class Mode(StrEnum):
    FAST = "fast"
    EXACT = "exact"


class Arm(Config):
    name: str = "off"
    cost: float = 1.0


class Engine(Config):
    mode: Mode = Mode.FAST
    """How to draft.
    Two lines."""
    model_dir: Path = Path("models/x")
    arms: tuple[Arm, ...] = ()
    table: dict[str, float] = Field(default={})
    limit: int | None = None


class PolicyTrainerConfig(ServiceConfig):
    engine: Engine = Engine()
    note: str = ""
    on: bool = False


def reload(config: PolicyTrainerConfig, directory: Path) -> PolicyTrainerConfig:
    path = directory / "printed.toml"
    path.write_text(print_config(config, SECTION), encoding="utf-8")
    return load_config(PolicyTrainerConfig, SECTION, [path])


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)


@given(
    note=TEXT,
    cost=st.floats(allow_nan=False),
    table=st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
    limit=st.none() | st.integers(-(2**63), 2**63 - 1),
    mode=st.sampled_from(Mode),
)
def test_a_printed_tree_loads_back_to_itself(
    tmp_path_factory: pytest.TempPathFactory,
    note: str,
    cost: float,
    table: dict[str, float],
    limit: int,
    mode: Mode,
) -> None:
    engine = Engine(mode=mode, arms=(Arm(), Arm(name=note, cost=cost)), table=table, limit=limit)
    config = PolicyTrainerConfig(run=RunConfig(id="r-1", seed=7), engine=engine, note=note, on=True)
    assert reload(config, tmp_path_factory.getbasetemp()) == config


def test_descriptions_stand_above_their_keys() -> None:
    assert '# How to draft. Two lines.\nmode = "fast"\n' in print_config(
        PolicyTrainerConfig(), SECTION
    )


def test_a_password_in_a_url_is_masked() -> None:
    url = "redis://user:pa55@host:6379/0"
    printed = print_config(PolicyTrainerConfig(redis=RedisConfig(durable_url=url)), SECTION)
    assert 'durable_url = "redis://user:****@host:6379/0"' in printed
    assert "pa55" not in printed


def test_a_token_in_the_environment_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", string.ascii_lowercase)
    assert string.ascii_lowercase not in print_config(PolicyTrainerConfig(), SECTION)


TABLES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(tree=st.dictionaries(TEXT, TABLES, max_size=4))
def test_tables_survive_their_file(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "tables.toml"
    write_tables(path, tree)
    assert read_tables(path) == tree
