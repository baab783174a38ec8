"""Checks the gateway's requirements of a machine: torch, GPUs, SGLang, isolation of models' code.

This is a separate program, because it imports torch. Its arguments are `[--config FILE] [key=value
...]`; it prints a JSON list of findings.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.config.load import load_config
from paceline.errors import ConfigError, PacelineError
from paceline.local.checks import Finding, looked_at, reading_findings
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.sandbox import ALL_LAYERS, Sandbox

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def check_torch_and_gpus() -> list[Finding]:
    """Whether torch can be imported and sees the machine's GPUs."""
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "pip install 'paceline[train]', or make setup in a clone"
        return [Finding("torch", "fail", f"cannot be imported: {error}", advice)]
    version = Finding("torch", "ok", torch.__version__)
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        seen = ", ".join(f"{card.name} ({card.total_memory >> 30} GiB)" for card in cards)
        return [version, Finding("gpu", "ok", seen)]
    if NVIDIA_DRIVER.exists():
        advice = "install torch's CUDA build for this driver, and check CUDA_VISIBLE_DEVICES"
        return [version, Finding("gpu", "warn", "torch does not see the GPU", advice)]
    return [version, Finding("gpu", "ok", "none: engines and trainers run on the CPU")]


def check_sglang(config: GatewayConfig) -> Finding:
    """Whether the installed SGLang is supported; only the engine kind sglang requires it."""
    from paceline.services.rollout_gateway.engines.sglang.host import check_installed

    found = looked_at("sglang", check_installed)
    if found.verdict == "ok" or config.engine.kind == "sglang":
        return found
    return Finding("sglang", "ok", f"{found.seen}; engine.kind={config.engine.kind} needs none")


async def check_isolation(config: GatewayConfig) -> Finding:
    """Available isolation of models' code. A gateway only refuses to start if its settings name an
    isolation.
    """
    isolation = config.rewards.sandbox.isolation
    try:
        layers = await Sandbox(config.rewards.sandbox).layers()
    except PacelineError as error:
        refused = isinstance(error, ConfigError) and isolation != "auto"
        return Finding.of_error("sandbox", error, "fail" if refused else "warn")
    if layers:
        weaker = "" if layers == ALL_LAYERS else " (this machine lacks some layers)"
        return Finding("sandbox", "ok", f"{'+'.join(layers)}{weaker}")
    advice = 'gateway.rewards.sandbox.isolation = "auto", unless the code is trusted'
    return Finding("sandbox", "warn", "limits alone: code reads files, opens sockets", advice)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the findings."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    words = parser.parse_intermixed_args(argv)
    findings: list[Finding] = []
    try:
        config = load_config(GatewayConfig, "gateway", words.config, words.overrides)
    except ConfigError as error:
        findings.append(Finding.of_error("gateway settings", error))
        config = GatewayConfig()
    findings += check_torch_and_gpus()
    if findings[-1].check == "gpu":  # torch is installed, and the engine's host imports it
        findings.append(check_sglang(config))
    workers = Finding("engine workers", "ok", f"{config.worker_count} on this host")
    findings += [workers, asyncio.run(check_isolation(config))]
    if config.model and Path(config.model).is_dir():
        tokenizer = Path(config.tokenizer) if config.tokenizer else None
        findings += reading_findings(Path(config.model), tokenizer)
    print(json.dumps([asdict(finding) for finding in findings]))


if __name__ == "__main__":
    main()
