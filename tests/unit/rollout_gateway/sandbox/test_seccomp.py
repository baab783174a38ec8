"""The system-call filter: its numbers against the kernel's headers, its decisions by running the
program itself.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from paceline.services.rollout_gateway.sandbox.launcher import linux

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LISTED = (linux.ALWAYS, linux.SHARED, linux.SIGNALS, linux.ARGUMENTS)
READ = {"x86_64": 0, "aarch64": 63}


def decide(
    program: list[linux.Instruction], number: int, architecture: int, *arguments: int
) -> int:
    """Return the filter's verdict on a call: classic BPF, the five instructions it uses."""
    passed = [*arguments, *[0] * (6 - len(arguments))]
    data = {0: number, 4: architecture}
    data |= {16 + 8 * index: value & 0xFFFFFFFF for index, value in enumerate(passed)}
    at, loaded = 0, 0
    while True:
        code, jump_true, jump_false, value = program[at]
        at += 1
        match code:
            case 0x20:
                loaded = data[value]
            case 0x15:
                at += jump_true if loaded == value else jump_false
            case 0x35:
                at += jump_true if loaded >= value else jump_false
            case 0x54:
                loaded &= value
            case 0x06:
                return value


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no kernel headers here")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: int(number) for name, number in lines}
    ours = linux.numbers(machine, *LISTED)
    assert {name: number for name, number in ours.items() if name in known} == {
        name: known[name] for name in ours if name in known
    }
    assert {name for name in ours if name not in known and ours[name] < 450} == set()
    assert len(set(ours.values())) == len(ours)


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("scoped", [True, False])
def test_every_call_gets_its_answer(machine: str, alone: bool, scoped: bool) -> None:
    program = linux.filter_program(machine, alone=alone, scoped=scoped, pid=77)
    assert len(program) < 4096
    assert all(jump < 256 for _, true, false, _ in program for jump in (true, false))
    numbers = linux.numbers(machine, *LISTED)

    def answer(name: str, *arguments: int) -> int:
        return decide(program, numbers[name], ARCHITECTURES[machine], *arguments)

    asked = numbers.keys() - linux.numbers(machine, linux.ARGUMENTS).keys()
    groups = [linux.ALWAYS] if alone else [linux.ALWAYS, linux.SHARED]
    groups += [] if alone or scoped else [linux.SIGNALS]
    expected = linux.numbers(machine, *groups).keys()
    assert {name for name in asked if answer(name) == REFUSE} == expected
    assert answer("clone3") == UNKNOWN
    assert answer("tgkill", 77) == ALLOW
    assert answer("tgkill", 78) == (ALLOW if alone or scoped else REFUSE)
    assert decide(program, READ[machine], ARCHITECTURES[machine]) == ALLOW


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "arguments", "passes"),
    [
        ("clone", (0x00050F00,), True),
        ("clone", (0x10000000,), False),
        ("clone", (0x20000011,), False),
        ("socketpair", (1, 0x80801), True),  # a stream, closed on exec, not blocking
        ("socketpair", (1, 0x80002), False),
        ("socketpair", (2, 1), False),
        ("prlimit64", (0,), True),
        ("prlimit64", (1,), False),
        ("mmap", (0, 4096, 3, 0x22), True),  # private, anonymous
        ("mmap", (0, 4096, 1, 0x1), True),  # shared, of a file
        ("mmap", (0, 4096, 3, 0x21), False),
        ("mmap", (0, 4096, 3, 0x40022), False),
        ("fcntl", (3, 1, 0x80000000), True),
        ("fcntl", (3, 8, 1), False),
        ("fcntl", (3, 15, 0), False),
        ("fcntl", (3, 1031, 1 << 20), False),
        ("ioctl", (3, 0x5421), True),
        ("ioctl", (3, 0x8901), False),
        ("prctl", (15,), True),
        ("prctl", (4, 0), False),
        ("prctl", (41, 0), False),
    ],
)
def test_a_call_passes_by_its_arguments(
    machine: str, name: str, arguments: tuple[int, ...], passes: bool
) -> None:
    program = linux.filter_program(machine, alone=True, scoped=True, pid=77)
    number = linux.numbers(machine, linux.ARGUMENTS)[name]
    answer = decide(program, number, ARCHITECTURES[machine], *arguments)
    assert answer == (ALLOW if passes else REFUSE)


def test_calls_of_another_architecture_end_the_process_and_newer_ones_are_unknown() -> None:
    program = linux.filter_program("x86_64", alone=True, scoped=True, pid=1)
    assert decide(program, 41, 0x40000003) == KILL
    for number in (0x40000000 + 41, linux.UNKNOWN, 0xFFFFFFFF):
        assert decide(program, number, ARCHITECTURES["x86_64"]) == UNKNOWN
    with pytest.raises(OSError, match="riscv64"):
        linux.filter_program("riscv64", alone=True, scoped=True, pid=1)
