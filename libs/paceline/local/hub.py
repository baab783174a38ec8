"""Resolves a model name to a checkpoint directory: a local directory or a Hugging Face Hub id.

Files of a Hub model are downloaded once into the Hub's own cache ($HF_HOME). Only safetensors
weights are downloaded and read, never pickled files. If the Hub is unreachable, an earlier download
is used.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.addresses import exempt_loopback
from paceline.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NEEDED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    WEIGHTS,
    INDEX,
    "model-*.safetensors",
)
"""Patterns of the checkpoint files that Paceline reads."""
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_ASK_S = 20.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def is_hub_id(model: str) -> bool:
    """Whether a name may be a Hub id and is no local path: `owner/name`, `owner/name@revision`."""
    return _ID.fullmatch(model) is not None and not Path(model).exists()


def model_directory(model: str, say: Callable[[str], None]) -> Path:
    """The directory of a model; `say` receives each download before it starts.

    A name that is no id is returned as a path; its reader checks it. Raises ConfigError for an id
    that is absent, gated or without safetensors. Raises ConfigError if the Hub is unreachable and
    no complete download exists.
    """
    if not is_hub_id(model):
        return Path(model)
    repository, _, revision = model.partition("@")
    # Import late: it is slow, and most models are directories.
    import httpx
    from huggingface_hub import errors

    try:
        return _from_hub(repository, revision or None, say)
    except errors.GatedRepoError as error:
        raise ConfigError(
            "the Hub gives this model only to those who have asked for it",
            seen=model,
            allowed=f"access at https://huggingface.co/{repository}, and $HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError("the model has no such revision on the Hub", seen=model) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            "no such directory, and no such model on the Hub",
            seen=model,
            allowed="a checkpoint directory, or owner/name; a private one with $HF_TOKEN",
        ) from error
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        return _downloaded_before(repository, revision or None, say, error)


def _from_hub(repository: str, revision: str | None, say: Callable[[str], None]) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache

    exempt_loopback(constants.ENDPOINT)
    about = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_ASK_S)
    sizes = {
        file.rfilename: file.size or 0
        for file in about.siblings or ()
        if any(
            Path(file.rfilename).match(one) and _depth(file.rfilename) == _depth(one)
            for one in NEEDED
        )
    }
    _require_checkpoint(repository, sizes)
    missing = [
        name
        for name in sizes
        if not isinstance(try_to_load_from_cache(repository, name, revision=about.sha), str)
    ]
    if missing:
        size = shown_size(sum(sizes[name] for name in missing))
        say(f"{repository} at {str(about.sha)[:12]}: downloading {size} in {len(missing)} files")
        say(f"  {', '.join(f'{name} ({shown_size(sizes[name])})' for name in sorted(missing))}")
    found = Path(snapshot_download(repository, revision=revision, allow_patterns=sorted(sizes)))
    say(f"{repository} is at {found}")
    return found


def _depth(path: str) -> int:
    return path.count("/")


def _require_checkpoint(repository: str, names: Any) -> None:
    """Raises ConfigError unless the files make up a usable checkpoint."""
    lacking = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        lacking.append(WEIGHTS)
    if lacking:
        raise ConfigError(
            "this model on the Hub is no checkpoint that can be served",
            seen=f"{repository} without {', '.join(lacking)}",
            allowed="config.json, tokenizer.json and model.safetensors",
        )


def _downloaded_before(
    repository: str, revision: str | None, say: Callable[[str], None], cause: Exception
) -> Path:
    """The cached snapshot. Raises ConfigError if it is absent or incomplete."""
    from huggingface_hub import errors, snapshot_download

    why = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    try:
        found = Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=[*NEEDED], local_files_only=True
            )
        )
    except (errors.LocalEntryNotFoundError, OSError, ValueError):
        found = None
    if found is None or not _complete(found):
        raise ConfigError(
            "the Hub cannot be reached, and this model was not downloaded before, or only in part",
            seen=f"{repository} ({why})",
            allowed="a network, a directory, or a whole model in $HF_HOME",
        ) from cause
    say(f"the Hub cannot be reached ({why}); {repository} was downloaded before, to {found}")
    return found


def _complete(directory: Path) -> bool:
    weights = [WEIGHTS]
    if (directory / INDEX).is_file():
        weights = sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
    return all((directory / name).is_file() for name in ("config.json", "tokenizer.json", *weights))


def shown_size(size: float) -> str:
    """Formats a size in bytes for display."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
