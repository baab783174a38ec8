"""Serves the Tinker API on this machine: `paceline serve tinker`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.arm_names import OFF
from paceline.cli import play, run_files
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import ConfigError
from paceline.local import processes, services, tokens
from paceline.local.patience import patient, unless
from paceline.local.supervisor import Supervisor, run_launches
from paceline.speculators.kinds import drafter_directory, find_kind

_SERVICES = ("redis", "redis_features", "gateway", "policy_trainer", "tinker")
_START_S = 900.0
"""Seconds for the start, which loads a model of any size."""
_STOP_GRACE_S = 20.0


async def serve_tinker(files: Sequence[Path], overrides: Sequence[str], console: Console) -> int:
    """Starts Redis, a gateway, the policy trainer, the front and the trainer of a drafter that can
    be trained; returns 130 after a signal.

    Raises ConfigError without a model, Unavailable if a service fails.
    """
    settings = [path.absolute() for path in files]
    tree = run_files.merged(settings, overrides)
    model = tree.get("gateway", {}).get("model", "")
    if not model:
        raise ConfigError("there is no model to train", allowed="--model DIR")
    drafter = trained_drafter(tree)
    own = ["policy_trainer.push_head=false"]
    if drafter:
        own = [f"drafter_trainer.drafter={drafter}", "gateway.trajectories=true"]
        own.append("tinker.drafter_workers=1")
    words = [f"tinker.model={model}", *own, *overrides]
    config = load_config(ServiceConfig, "local", settings, words)
    directory = Path(config.run.dir)
    with processes.owned(directory, processes.SUPERVISOR):
        tokens.use_run_tokens(config)
        launches = run_launches(
            config, settings, words, services=[*_SERVICES, *["drafter_trainer"] * bool(drafter)]
        )
        beat_s, hung_s, health_s = config.run.heartbeat_s, config.run.hung_s, patient(_START_S)
        supervisor = Supervisor(
            launches, directory, health_s=health_s, heartbeat_s=beat_s, hung_s=hung_s
        )
        async with supervisor:
            with play.stop_requests() as stop:
                if await unless(stop, _run(supervisor, config, console)):
                    return 0
            await supervisor.stop(_STOP_GRACE_S)
    return play.EXIT_INTERRUPTED


def trained_drafter(tree: Mapping[str, Any]) -> str:
    """The drafter in the settings if it can be trained and the front lends workers, else ""."""
    drafter = str(tree.get("gateway", {}).get("drafter", OFF))
    trained = drafter != OFF and (drafter_directory(drafter) or find_kind(drafter).trained)
    return drafter if trained and tree.get("tinker", {}).get("drafter_workers", 1) else ""


async def _run(supervisor: Supervisor, config: ServiceConfig, console: Console) -> None:
    await supervisor.start(patient(_START_S))
    scheme = "https" if config.security.tls_cert else "http"
    address = config.addresses.of(services.TINKER.more_address_keys[0])
    file = tokens.token_file(config, tokens.OPERATOR)
    kept = config.security.run_tokens and file.exists()
    token = f"$(cat {shlex.quote(str(file))})" if kept else f"${config.security.token_env}"
    for line in (f"TINKER_BASE_URL={scheme}://{address}", f"TINKER_API_KEY=tml-{token}"):
        console.print(f"export {line}", highlight=False, soft_wrap=True, markup=False)
    await supervisor.wait_finished()
