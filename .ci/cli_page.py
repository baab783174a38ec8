"""Writes docs/cli.md: every command of `paceline` with its arguments and options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from cells import escaped

from paceline.cli.main import app

PROGRAM = "paceline"


def cli_page() -> str:
    """The program's own options, then its commands in the order of `paceline --help`."""
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name=PROGRAM)
    lines = [
        "# Command line",
        "",
        "Written by `make docs` from `libs/paceline/cli/`. A command with invalid arguments exits",
        "with 2 and prints the reason.",
        "",
        escaped(inspect.cleandoc(root.help)),
        *parameter_table(root, context),
        "",
        *("| command | effect |", "|---|---|"),
    ]
    commands = list(commands_of(root, context))
    for name, command, _ in commands:
        what = command.get_short_help_str(limit=200)
        anchor = f"{PROGRAM}-{name}".replace(" ", "-")
        lines.append(f"| [`{PROGRAM} {name}`](#{anchor}) | {escaped(what)} |")
    for name, command, above in commands:
        lines += command_lines(name, command, above)
    return "\n".join(lines) + "\n"


def commands_of(group: Any, context: Any, before: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every command, those of groups included: its whole name and the context above it."""
    for name in group.list_commands(context):
        command = group.commands[name]
        if hasattr(command, "commands"):
            own = command.context_class(command, info_name=name, parent=context)
            yield from commands_of(command, own, f"{before}{name} ")
        else:
            yield f"{before}{name}", command, context


def command_lines(name: str, command: Any, above: Any) -> Iterator[str]:
    """One command: its usage, its help, a table of its arguments and options."""
    context = command.context_class(command, info_name=command.name, parent=above)
    arguments = (argument_name(one) for one in command.params if is_argument(one))
    usage = " ".join((PROGRAM, name, command.options_metavar, *arguments))
    yield from ("", f"## {PROGRAM} {name}", "", f"    {usage}")
    yield from ("", escaped(inspect.cleandoc(command.help or "")))
    yield from parameter_table(command, context)


def parameter_table(command: Any, context: Any) -> Iterator[str]:
    """Arguments and options; nothing where a command takes none, or hands its line on."""
    rows = [parameter_row(one, context) for one in command.params if not one.hidden]
    if rows:
        yield from ("", "| argument or option | default | meaning |", "|---|---|---|", *rows)


def parameter_row(parameter: Any, context: Any) -> str:
    """One argument or option."""
    if is_argument(parameter):
        spelled = argument_name(parameter)
    else:
        names = ", ".join((*parameter.opts, *parameter.secondary_opts))
        spelled = names if parameter.is_flag else f"{names} {value_name(parameter, context)}"
    default = parameter.default
    hidden = default is None or default is False or default == "" or callable(default)
    meaning = escaped(" ".join((parameter.help or "").split()))
    shown = "" if hidden else f"`{default}`"
    return f"| {code(spelled)} | {shown} | {meaning} |"


def code(text: str) -> str:
    """Code in a cell. No two readers of Markdown agree on a bar within backticks."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def is_argument(parameter: Any) -> bool:
    """Whether it is told by its place."""
    return bool(parameter.param_type_name == "argument")


def argument_name(parameter: Any) -> str:
    """As the usage has it: in brackets where it may be left out, with dots where it may repeat."""
    name = parameter.metavar or parameter.name.upper()
    if parameter.nargs != 1 and "..." not in name:
        name = f"{name}..."
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def value_name(parameter: Any, context: Any) -> str:
    """What is to stand behind an option: INT, PATH or a name of its own."""
    kind = parameter.display_type(context).strip("<>").split(" ")[0]
    name = kind.removeprefix("list[").rstrip("]")
    return parameter.metavar or (name if "|" in name else name.upper())
