"""Runs a task's tests against untrusted code. A program for the sandbox: standard library only,
sent as text.

It has two processes. The child loads the code and answers calls. The parent holds the tests,
compares and reports. The child is forked before the parent reads the tests, has neither its stdin
nor its stdout, and cannot attach to it. The processes exchange only plain values as JSON. So the
code cannot see the expected results, cannot send objects that equal everything, and can end only
itself. Other values stay in the child and are called through a handle.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

CANDIDATE_FILE = "candidate.py"
READY = "ready"
MAX_MESSAGE_BYTES = 16 << 20
_PR_SET_DUMPABLE = 4


class Wire:
    """Messages over two pipes, one line of JSON each."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = os.fdopen(reader, "rb")
        self._writer = os.fdopen(writer, "wb")

    def send(self, message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise ValueError("a value is too large to be passed")
        self._writer.write(line)
        self._writer.flush()

    def receive(self) -> Any:
        """Raises EOFError when the other side has ended or sends too much, ValueError for invalid
        JSON.
        """
        line = self._reader.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the code has ended")
        try:
            return json.loads(line)
        except RecursionError as error:
            raise ValueError("nested too deep to be read") from error


def pack(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON: plain data in full, any other value as the number that `keep` returns for
    it.
    """
    if value is None or value is True or value is False:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kinds in (("list", list), ("tuple", tuple), ("frozenset", frozenset), ("set", set)):
        if isinstance(value, kinds):
            return {name: [pack(one, keep) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(one, keep)] for key, one in value.items()]}
    return {"handle": keep(value)}


def unpack(packed: Any, find: Callable[[int], Any]) -> Any:
    """The packed value; `find` returns the value of a handle.

    Raises ValueError for a form that `pack` does not write.
    """
    if not isinstance(packed, dict):
        if isinstance(packed, list):
            raise ValueError("not a packed value")
        return packed

    [(kind, content)] = packed.items()
    if kind == "dict":
        return {unpack(key, find): unpack(one, find) for key, one in content}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(unpack(one, find) for one in content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "handle" and isinstance(content, int):
        return find(content)
    raise ValueError("not a packed value")


# ---- the child: the code


class CodeSide:
    """Answers calls on the code's own objects."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._kept: list[Any] = []

    def run(self) -> None:
        """Load the code, send its globals, and answer calls until the parent closes the pipe."""
        sys.set_int_max_str_digits(0)
        try:
            module = types.ModuleType("candidate")
            module.__file__ = CANDIDATE_FILE
            sys.modules["candidate"] = module
            with open(CANDIDATE_FILE, encoding="utf-8") as file:
                exec(compile(file.read(), CANDIDATE_FILE, "exec"), module.__dict__)  # noqa: S102
        except BaseException as error:  # noqa: BLE001  (the tests judge any error of the code)
            self._wire.send({"error": [type(error).__name__, str(error)]})
            return

        public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        self._wire.send({"value": pack(public, self._keep)})
        while True:
            try:
                message = self._wire.receive()
            except EOFError:
                return
            self._wire.send(self._answer(message))

    def _keep(self, value: Any) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def _answer(self, message: Any) -> dict[str, Any]:
        try:
            target = self._kept[message["handle"]]
            find = self._kept.__getitem__
            arguments = [unpack(one, find) for one in message["arguments"]]
            named = {key: unpack(one, find) for key, one in message["named"].items()}
            value = pack(_ACTIONS[message["action"]](target, *arguments, **named), self._keep)
            return {"value": value, "arguments": [pack(one, self._keep) for one in arguments]}
        except BaseException as error:  # noqa: BLE001  (also SystemExit: the code may not end the tests)
            return {"error": [type(error).__name__, str(error)[:2000]]}


_ACTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **named: target(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda target, key: target[key],
    "setitem": lambda target, key, value: target.__setitem__(key, value),
    "delitem": lambda target, key: target.__delitem__(key),
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "iter": iter,
    "next": next,
    "eq": lambda target, other: bool(target == other),
}


# ---- the parent: the tests


def _asks(action: str, read: Callable[[Any], Any] = lambda value: value) -> Any:
    """Make a method that calls the code; `read` converts the answer to the type that Python
    requires.
    """

    def method(self: Handle, *arguments: Any, **named: Any) -> Any:
        return read(_ask(self, action, *arguments, **named))

    return method


def iter_of(handle: Any) -> Iterator[Any]:
    """The items of an iterator of the code."""
    while True:
        try:
            yield next(handle)
        except StopIteration:
            return


class Handle:
    """An object of the code.

    It has no order and no arithmetic, and equals no plain value, since the code could fake such
    results.
    """

    def __init__(self, side: TestSide, number: int) -> None:
        object.__setattr__(self, "_of", (side, number))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            # Python itself looks these names up, e.g. to copy or to print
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and _ask(self, "eq", other) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_of")[1])

    __call__ = _asks("call")
    __setattr__ = _asks("setattr")
    __getitem__ = _asks("getitem")
    __setitem__ = _asks("setitem")
    __delitem__ = _asks("delitem")
    __len__ = _asks("len", int)
    __str__ = _asks("str", str)
    __repr__ = _asks("repr", str)
    __bool__ = _asks("bool", lambda value: value is True)
    __iter__ = _asks("iter", iter_of)
    __next__ = _asks("next")


def _ask(handle: Handle, action: str, *arguments: Any, **named: Any) -> Any:
    side, number = object.__getattribute__(handle, "_of")
    return side.ask(number, action, arguments, named)


class TestSide:
    """Calls the code for the tests and returns its results."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def names(self, modules: list[str], entry_point: str) -> dict[str, Any]:
        """The tests' globals: standard modules, then the code's definitions.

        A definition that shadows a builtin or one of the modules is left out, since the tests mean
        the original. The entry point is never left out. Raises KeyError when the code lacks the
        entry point, and the code's own error at loading.
        """
        found = self._value(self._wire.receive())
        taken = {*vars(builtins), *modules} - {entry_point}
        texts = [name for name in found if isinstance(name, str)]
        own = {name: found[name] for name in texts if name not in taken}
        if entry_point and entry_point not in own:  # a builtin of that name must not replace it
            raise KeyError(entry_point)
        space: dict[str, Any] = {"__name__": "tests"}
        for name in modules:
            with contextlib.suppress(ImportError):  # a module of another system
                space[name] = importlib.import_module(name)
        return space | own

    def ask(
        self, number: int, action: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Make one call. Lists, dicts and sets among the arguments take the code's changes."""
        packed = [pack(one, _number_of) for one in arguments]
        more = {key: pack(one, _number_of) for key, one in named.items()}
        self._wire.send({"handle": number, "action": action, "arguments": packed, "named": more})
        reply = self._wire.receive()
        if action != "next" and reply.get("error", [""])[0] == "StopIteration":
            # within a map it would end the loop of the comparing test
            raise RuntimeError("the code raised StopIteration")
        value = self._value(reply)
        for mine, theirs in zip(arguments, reply["arguments"], strict=True):
            _update(mine, unpack(theirs, partial(Handle, self)))
        return value

    def _value(self, reply: Any) -> Any:
        if "error" in reply:
            _raise(*reply["error"])
        return unpack(reply["value"], partial(Handle, self))


def _number_of(value: Any) -> int:
    if not isinstance(value, Handle):
        kind = type(value).__name__
        raise TypeError(f"a test can pass plain values and the code's own objects, not {kind}")
    return int(object.__getattribute__(value, "_of")[1])


def _update(mine: Any, theirs: Any) -> None:
    if type(mine) is list and type(theirs) is list:
        mine[:] = theirs
    elif type(mine) in (dict, set) and type(theirs) is type(mine):
        mine.clear()
        mine.update(theirs)


def _raise(name: str, message: str) -> NoReturn:
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(message)
        except TypeError:  # a few exceptions need more than a text
            error = RuntimeError(f"{name}: {message}")
        raise error
    raise RuntimeError(f"{name}: {message}")


def passed_tests(statements: list[dict[str, Any]], space: dict[str, Any]) -> Iterator[int]:
    """Run the statements of the tests in order and yield the number of each passed test."""
    for statement in statements:
        try:
            exec(compile(statement["source"], "tests.py", "exec"), space)  # noqa: S102
            if statement["function"]:
                space[statement["function"]]()
        except BaseException:  # noqa: BLE001, S112  (a test fails; or a preparation, and then the tests that need it)
            continue
        if statement["test"] is not None:
            yield statement["test"]


def main() -> None:
    """Read the JSON that code_tests.py makes of the tests from stdin.

    Stdout: READY, then "nonce number" for each passed test.
    """
    # before a process of the code exists that could prevent it
    print(READY, flush=True)
    sys.path.remove(os.getcwd())  # the code can write modules there
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    if os.fork() == 0:
        for fd in (from_parent, to_parent):
            os.close(fd)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        CodeSide(Wire(to_child, from_child)).run()
        os._exit(0)

    os.close(to_child)
    os.close(from_child)
    sys.set_int_max_str_digits(0)
    asked = json.load(sys.stdin)
    report, sys.stdout = sys.stdout, sys.stderr  # output of the tests is no report
    try:
        space = TestSide(Wire(to_parent, from_parent)).names(asked["modules"], asked["entry_point"])
    except Exception:  # noqa: BLE001  (the code does not load: no test passes)
        return

    for number in passed_tests(asked["statements"], space):
        print(asked["nonce"], number, file=report, flush=True)


if __name__ == "__main__":
    main()
