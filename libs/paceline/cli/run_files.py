"""Locates the files and models of a run, and creates the directory and config of a demo run."""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.addresses import loopback
from paceline.config import RUN_ID, SERVICE_SECTIONS, SHARED_SECTIONS, ServiceConfig, load
from paceline.errors import ConfigError, NotFound
from paceline.local.hub import is_hub_id, model_directory
from paceline.local.ports import free_ports
from paceline.local.processes import usable_cores

EXAMPLES = Path("examples/demo")
"""Folder of the demo's model, tasks and settings: below the repository's root, or below the package
in a wheel.
"""

_UNTRAINED = {"coordinator": {"drafter_enabled": False}, "policy_trainer": {"push_head": False}}
"""Without drafter training, no trainer commits heads, so the policy trainer pushes none."""


_PLACES = ("addresses.", "redis.", "telemetry.", "security.", "run.id", "run.dir")
"""Settings that say where a run is, not what it does."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `paceline demo`."""

    steps: int = 80  # RL steps, numbered from 0 to steps - 1
    seed: int = 0
    engine: str = "embedded"  # or "sglang"
    speculation: bool = True
    frozen_drafter: Path | None = None
    config: Path | None = None  # replaces examples/demo/demo.toml
    resume: str | None = None
    out: Path = Path("runs")
    overrides: tuple[str, ...] = ()  # <section>.<key>=<value>


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The paths of a run's files."""

    run_id: str
    directory: Path  # absolute
    spans_dir: str = ""  # empty: inside the directory

    @property
    def config(self) -> Path:
        """Settings of all services."""
        return self.directory / "config.toml"

    @property
    def spans(self) -> Path:
        """Directory of all processes' span files."""
        return Path(self.spans_dir) if self.spans_dir else self.directory / "spans"

    @property
    def summary(self) -> Path:
        """Figures of the run, as JSON."""
        return self.directory / "summary.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.directory / "report.html"

    def read_config(self) -> load.Tree:
        """Reads the settings as TOML tables."""
        return load.read_tables(self.config)


def files_of(config: ServiceConfig) -> RunFiles:
    """The file paths of the run with these settings."""
    return RunFiles(config.run.id, Path(config.run.dir).absolute(), config.telemetry.spans_dir)


def merged(files: Sequence[Path], overrides: Sequence[str]) -> load.Tree:
    """The merged settings of all files and overrides; later values win."""
    tree: load.Tree = {}
    for path in files:
        load.merge(tree, load.read_tables(path))
    for override in overrides:
        load.merge(tree, parse_override(override))
    return tree


def differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, value here, value there) of the settings that differ between two runs, except names,
    addresses and directories.
    """
    ours, theirs = dict(_leaves(here)), dict(_leaves(there))
    return [
        (key, ours.get(key, "default"), theirs.get(key, "default"))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        elif not name.startswith(_PLACES):
            yield name, str(value)


def note_settings(files: RunFiles, settings: Sequence[Path], overrides: Sequence[str] = ()) -> None:
    """Writes a run's settings as its config.toml, where other commands find them."""
    load.write_tables(files.config, merged(settings, overrides))


def repository_root() -> Path:
    """The root of a repository or installed package that contains examples/demo.

    Raises NotFound if neither contains it.
    """
    package = Path(paceline.__file__).resolve().parent
    places = (Path.cwd(), package.parents[1], package)
    for place in places:
        if (place / EXAMPLES / "demo.toml").is_file():
            return place
    raise NotFound(
        "the demo's model and tasks are not installed; run it inside a clone of the repository",
        seen=", ".join(str(place) for place in places),
        allowed=f"a directory with {EXAMPLES}/demo.toml",
    )


def find_run(options: DemoOptions) -> RunFiles:
    """The files of the run to resume, or of a new run in a directory with the lowest free number.

    Raises NotFound if the demo's files or the run are absent, ConfigError if the directory cannot
    be made.
    """
    out, run_id = options.out.absolute(), options.resume
    if run_id is not None:
        if not re.fullmatch(RUN_ID, run_id) or not (out / run_id / "config.toml").is_file():
            known = ", ".join(sorted(path.parent.name for path in out.glob("*/config.toml")))
            message = f"no run of this id in {out}"
            raise NotFound(message, seen=run_id, allowed=known or "no runs there yet")
        return RunFiles(run_id, out / run_id)
    repository_root()
    for number in itertools.count(1):
        files = RunFiles(f"demo-{options.seed}-{number}", out / f"demo-{options.seed}-{number}")
        try:
            files.directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            message = f"the run's directory cannot be made: {error.strerror}"
            raise ConfigError(message, seen=files.directory) from error
        break
    return files


def configure_run(files: RunFiles, options: DemoOptions) -> None:
    """Writes the run's config.toml, or updates it for a resumed run.

    Raises ConfigError for an invalid option.
    """
    if options.resume is not None:
        tree = files.read_config()
    else:
        root = repository_root()
        tree = _rooted(load.read_tables(options.config or root / EXAMPLES / "demo.toml"), root)
        load.merge(tree, _variant(options))
        load.merge(tree, {"run": {"seed": options.seed}})
    workers = int(tree.get("gateway", {}).get("engine", {}).get("workers", 0))
    for part in (
        _placement(files),
        {"coordinator": {"steps": options.steps}},
        {"gateway": {"engine": {"workers": min(workers, usable_cores())}}} if workers else {},
        *map(parse_override, options.overrides),
    ):
        load.merge(tree, part)
    load.write_tables(files.config, tree)


def _variant(options: DemoOptions) -> load.Tree:
    """Settings of the engine and of its drafter."""
    tree: load.Tree = {"gateway": {"engine": {"kind": options.engine}}}
    if options.engine == "sglang":
        # It serves one speculator. So it cannot add an n-gram arm to EAGLE, and uses its default
        # arms.
        load.merge(tree, {"gateway": {"speculation": {"arms": []}}})
    frozen = options.frozen_drafter and options.frozen_drafter.absolute()
    if frozen is not None:
        if not options.speculation:
            message = "--no-speculation and --frozen-drafter exclude each other"
            raise ConfigError(message, seen=frozen)
        if not (frozen / "config.json").is_file():
            message = "--frozen-drafter is not a drafter checkpoint"
            raise ConfigError(message, seen=frozen, allowed="a directory with config.json")
        served = {"drafter": str(frozen)}
        load.merge(tree, {"gateway": served, "drafter_trainer": served, **_UNTRAINED})
    elif not options.speculation:
        gateway = {"drafter": "off", "speculation": {"arms": ["off"]}}
        load.merge(tree, {"gateway": gateway, **_UNTRAINED})
    return tree


def _placement(files: RunFiles) -> load.Tree:
    """Directory and free ports of the run.

    A user's $REDIS_URL is stored, so that a resume without the variable uses the same server.
    """
    own = os.environ.get("REDIS_URL")
    services = ("coordinator", "gateway", "policy_trainer", "drafter_trainer", "http", "events")
    ports = zip(services, free_ports(len(services)), strict=True)
    addresses = {name: f"{loopback()}:{port}" for name, port in ports}
    addresses["events"] = f"tcp://{addresses['events']}"
    return {
        "run": {"id": files.run_id, "dir": str(files.directory)},
        "redis": dict.fromkeys(("durable_url", "features_url"), own) if own else {},
        "addresses": addresses,
        "telemetry": {"spans_dir": str(files.spans)},
    }


def _rooted(tree: load.Tree, root: Path) -> load.Tree:
    """The settings with absolute paths for files of the repository."""
    rooted = dict(tree)
    for key, value in tree.items():
        if isinstance(value, dict):
            rooted[key] = _rooted(value, root)
        elif isinstance(value, str) and "/" in value and (root / value).exists():
            rooted[key] = str(root / value)
    return rooted


def parse_override(text: str) -> load.Tree:
    """Parses `section.key=value` into a tree.

    Raises ConfigError if the key's section is unknown to all services.
    """
    key, equals, raw = text.partition("=")
    parts, sections = key.strip().split("."), (*SHARED_SECTIONS, *SERVICE_SECTIONS)
    if not equals or len(parts) < 2 or parts[0] not in sections:
        message = "an override of a whole run names its section"
        allowed = f"<section>.<key>=<value> with one of {', '.join(sections)}"
        raise ConfigError(message, seen=text, allowed=allowed)
    return load.nested(key.strip(), load.value_of(raw))


def found_models(
    files: Sequence[Path], overrides: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """Settings with the directory of every model that is named by its Hub id or below ~. A trainer
    without a model trains the gateway's.

    Raises as `model_directory`.
    """
    tree, models = merged(files, overrides), dict[str, str]()
    served = str(tree.get("gateway", {}).get("model", ""))
    for name in ("gateway", "policy_trainer", "drafter_trainer"):
        own = str(tree.get(name, {}).get("model", ""))
        if (own or served) and (not own or is_hub_id(own) or own.startswith("~")):
            models[name] = own or served
    found = {model: model_directory(model, say) for model in dict.fromkeys(models.values())}
    return [f"{name}.model={found[model]}" for name, model in models.items()]
