"""The last step: the process becomes a fresh interpreter that runs main.py."""

from __future__ import annotations

import os
import sys

from .request import CODE_FILE, MEMORY_EXIT

# No file of the gateway is readable any more, so the first code is passed as text. The program sees
# itself as `__main__` with its own traceback. exit() works although `site` did not run, since
# `site` would search for packages.
_FIRST = f"""
def first():
    import os, site, sys, types
    site.setquit()
    sys.argv[:] = [{CODE_FILE!r}]
    sys.path.insert(0, os.getcwd())
    module = types.ModuleType("__main__")
    module.__file__ = {CODE_FILE!r}
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    code = 0
    try:
        with open({CODE_FILE!r}, encoding="utf-8") as file:
            text = file.read()
        exec(compile(text, {CODE_FILE!r}, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = {MEMORY_EXIT} if isinstance(error, MemoryError) else 1
    if code == {MEMORY_EXIT}:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)

main_before = __import__("sys").modules["__main__"]
first()
"""


def replace_process() -> None:
    """Never returns. Raises OSError when the interpreter cannot be started."""
    here = os.getcwd()
    environment = {
        "HOME": here,
        "TMPDIR": here,
        "PATH": "",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",  # sets have the same order in every run, so scores are reproducible
    }
    executable = os.path.realpath(sys.executable)
    os.execve(executable, [executable, "-S", "-s", "-P", "-B", "-c", _FIRST], environment)  # noqa: S606
