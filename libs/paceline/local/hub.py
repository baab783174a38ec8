"""Resolves a model name to a checkpoint directory: a local directory or a Hugging Face Hub id.

Files of a Hub model are downloaded once into the Hub's own cache ($HF_HOME). Only safetensors
weights are downloaded and read, never pickled files. If the Hub is unreachable, an earlier download
is used.
"""

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from paceline.addresses import exempt_loopback
from paceline.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NEEDED = [
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab.json", "merges.txt"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
    *(WEIGHTS, INDEX, "model-*.safetensors"),
]
"""Patterns of the checkpoint files that Paceline reads."""
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_ASK_S = 20.0


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
        return Path(model).expanduser()
    repository, _, revision = model.partition("@")
    # Import late: it is slow, and most models are directories.
    import httpx
    from huggingface_hub import errors

    try:
        return _download(repository, revision or None, say)
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        cause = (isinstance(error, errors.DryRunError) and error.__cause__) or error
    if isinstance(cause, errors.GatedRepoError):
        message = "the Hub gives this model only to those who have asked for it"
        allowed = f"access at https://huggingface.co/{repository}, and $HF_TOKEN"
        raise ConfigError(message, seen=model, allowed=allowed) from cause
    if isinstance(cause, errors.RevisionNotFoundError):
        raise ConfigError("the model has no such revision on the Hub", seen=model) from cause
    if isinstance(cause, errors.RepositoryNotFoundError):
        message = "no such directory, and no such model on the Hub"
        allowed = "a checkpoint directory, or owner/name; a private one with $HF_TOKEN"
        raise ConfigError(message, seen=model, allowed=allowed) from cause
    return _find_download(repository, revision or None, say, cause)


def _download(repository: str, revision: str | None, say: Callable[[str], None]) -> Path:
    """Downloads the absent files. Raises ConfigError unless all files make up a checkpoint."""
    from huggingface_hub import HfApi, constants

    exempt_loopback(constants.ENDPOINT)
    # A silent Hub ends here: the same request inside snapshot_download has no deadline.
    HfApi().model_info(repository, revision=revision, timeout=_ASK_S)
    files = _snapshot(repository, revision, dry_run=True, etag_timeout=_ASK_S)
    if lacking := _lacking_files({file.filename for file in files}):
        message = "this model on the Hub is no checkpoint that can be served"
        seen = f"{repository} without {', '.join(lacking)}"
        allowed = "config.json, tokenizer.json and model.safetensors"
        raise ConfigError(message, seen=seen, allowed=allowed)
    sizes = {file.filename: file.file_size or 0 for file in files if file.will_download}
    if sizes:
        size, commit = decimal(sum(sizes.values())), files[0].commit_hash[:12]
        say(f"{repository} at {commit}: downloading {size} in {len(sizes)} files")
        say(f"  {', '.join(f'{name} ({decimal(sizes[name])})' for name in sorted(sizes))}")
    found = Path(_snapshot(repository, revision))
    say(f"{repository} is at {found}")
    return found


def _snapshot(repository: str, revision: str | None, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    return snapshot_download(repository, revision=revision, allow_patterns=NEEDED, **options)


def _find_download(
    repository: str, revision: str | None, say: Callable[[str], None], cause: BaseException
) -> Path:
    """The cached snapshot. Raises ConfigError if it is absent or incomplete."""
    reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    try:
        found = Path(_snapshot(repository, revision, local_files_only=True))
        if lacking := _lacking_files({path.name for path in found.iterdir()}, found / INDEX):
            raise FileNotFoundError(", ".join(lacking))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the Hub cannot be reached, and this model was not downloaded before, or only in part",
            seen=f"{repository} ({reason})",
            allowed="a network, a directory, or a whole model in $HF_HOME",
        ) from error
    say(f"the Hub cannot be reached ({reason}); {repository} was downloaded before, to {found}")
    return found


def _lacking_files(names: Collection[str], index: Path | None = None) -> list[str]:
    """Required files that are absent. `index`: names the weights of a downloaded checkpoint."""
    weights = {WEIGHTS}
    if index is not None and index.is_file():
        weights = set(json.loads(index.read_bytes())["weight_map"].values())
    elif INDEX in names:
        weights = {INDEX}
    return [name for name in ("config.json", "tokenizer.json", *weights) if name not in names]
