"""The Lua scripts of the streams; each file of the folder `lua` states its keys and arguments.

A script runs completely or not at all, so an append and its bookkeeping are one step. Sizes of a
stream's entries are in the hash `<stream>:sizes` (id -> bytes, and the field `total`). The callers
define the meaning of a script.
"""

from pathlib import Path

_FOLDER = Path(__file__).with_name("lua")


def script(*names: str) -> str:
    """The text of these scripts, in order: a script that calls `add`, `remove` or `note` follows
    the script that defines the function.
    """
    return "".join((_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in names)
