"""The embedded engine's hidden rows, as the gateway plans them before any engine starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidInput
from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.embedded.spec import layout_of_settings
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.workers.local import engine_settings
from paceline.speculators.kinds import drafter_directory

EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target of 12 layers, an EAGLE and an EAGLE-3 drafter: only the fields read here."""
    configs: dict[str, dict[str, Any]] = {
        "target": {"hidden_size": 16, "num_hidden_layers": 12},
        "eagle": {"architectures": ["LlamaForCausalLMEagle"]},
        "eagle3": EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 9]}},
    }
    for name, content in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return tmp_path


def layout(folder: Path, drafter: str, *more: str, layers: tuple[int, ...] = ()) -> RowLayout:
    keys = {
        "model": str(folder / "target"),
        "drafter": str(folder / drafter) if drafter.startswith("./") else drafter,
        "features": {"layers": layers},
        "engine": {"embedded": {"more_drafters": more}},
    }
    return layout_of_settings(engine_settings(GatewayConfig.model_validate(keys)))


@pytest.mark.parametrize(
    ("drafters", "layers", "expected"),
    [
        (("off",), (), "last"),
        (("eagle",), (), "last"),
        (("./eagle",), (), "last"),
        (("twin_kind:KIND",), (), "last"),
        (("twin_kind:DEEP",), (), "1,last"),
        (("eagle", "twin_kind:DEEP"), (), "1,last"),
        (("eagle3",), (), "2,6,9,last"),
        (("dflash", "eagle3"), (), "2,6,9,last"),
        (("./eagle3",), (), "1,5,10,last"),
        (("eagle", "eagle3"), (), "2,6,9,last"),
        (("./eagle3", "lstm", "eagle3"), (), "1,2,5,6,9,10,last"),
        (("eagle",), (3, 11), "3,11,last"),
        (("eagle3",), (2, 4, 6, 9), "2,4,6,9,last"),
    ],
)
def test_rows_hold_what_is_asked_for_or_else_what_the_drafters_read(
    drafters: tuple[str, ...], layers: tuple[int, ...], expected: str, folder: Path
) -> None:
    assert layout(folder, *drafters, layers=layers) == RowLayout(
        16 * len(expected.split(",")), expected, "post_norm"
    )


@pytest.mark.parametrize("layers", [(0, 1), (12,), (5, 5), (6, 2), (-1,)])
def test_layers_the_target_does_not_have_are_refused(layers: tuple[int, ...], folder: Path) -> None:
    with pytest.raises(ConfigError, match="ascending layers of 1 to 11"):
        layout(folder, "eagle", layers=layers)


def test_layers_that_leave_out_what_a_drafter_reads_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"seen: \(2, 6\); allowed: \[2, 6, 9\]"):
        layout(folder, "eagle", "eagle3", layers=(2, 6))


def test_a_target_too_shallow_for_eagle3_is_refused(folder: Path) -> None:
    (folder / "target" / "config.json").write_text('{"hidden_size": 16, "num_hidden_layers": 3}')
    assert layout(folder, "eagle").layers == "last"
    with pytest.raises(ConfigError, match="too shallow"):
        layout(folder, "eagle3")


def test_a_directory_without_drafter_is_named(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing"):
        layout(folder, "./nothing")


def test_a_name_is_no_directory_even_where_one_of_that_name_lies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert drafter_directory("eagle3") is None
    assert drafter_directory("./eagle3") == Path("eagle3")
    assert drafter_directory("target") == Path("target")
    assert drafter_directory("pkg.module:KIND") is None
    assert drafter_directory("kinds/mine.py:KIND") is None


@pytest.mark.slow
def test_what_workers_are_forked_from_imports_no_server() -> None:
    code = (
        "import importlib, sys; from paceline.services.rollout_gateway.engines import ENGINES\n"
        "for module in ENGINES['embedded'].forked: importlib.import_module(module)\n"
        "assert not {'grpc', 'redis', 'uvicorn', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))


@pytest.mark.slow
def test_the_gateway_learns_it_without_torch() -> None:
    code = (
        "import pkgutil, sys; from paceline.services.rollout_gateway.engines import ENGINES\n"
        "pkgutil.resolve_name(ENGINES['embedded'].row_layout); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))
