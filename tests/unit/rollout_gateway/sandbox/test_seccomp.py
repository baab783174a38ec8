"""The system-call filter: its numbers against the kernel's headers, its decisions by running the
program itself.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from rollout_gateway.sandbox.launcher import seccomp, syscalls

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE = 0x00050000 | errno.EPERM
LISTED = {
    **syscalls.ALWAYS,
    **syscalls.SHARED_SYSTEM,
    **syscalls.SIGNALS,
    **syscalls.WITH_CONDITIONS,
}


def decide(
    program: list[seccomp.Instruction], number: int, first: int = 0, architecture: int = 0
) -> int:
    """What the filter returns for a call: classic BPF, the five instructions it uses."""
    data = {0: number, 4: architecture, 16: first & 0xFFFFFFFF}
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
            case 0x45:
                at += jump_true if loaded & value else jump_false
            case 0x06:
                return value


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no kernel headers here")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: int(number) for name, number in lines}
    ours = syscalls.numbers(machine, LISTED)
    assert {name: number for name, number in ours.items() if name in known} == {
        name: known[name] for name in ours if name in known
    }
    assert {name for name in ours if name not in known and ours[name] < 450} == set()
    assert len(set(ours.values())) == len(ours)


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("scoped", [True, False])
def test_every_call_gets_its_answer(machine: str, alone: bool, scoped: bool) -> None:
    program = seccomp.program(machine, alone=alone, signals_are_scoped=scoped, pid=77)
    assert len(program) < 4096
    assert all(jump < 256 for _, true, false, _ in program for jump in (true, false))
    numbers = syscalls.numbers(machine, LISTED)

    def answer(name: str, first: int = 0) -> int:
        return decide(program, numbers[name], first, ARCHITECTURES[machine])

    refused = {
        name for name in numbers if name not in syscalls.WITH_CONDITIONS and answer(name) == REFUSE
    }
    expected = {*syscalls.ALWAYS, *([] if alone else syscalls.SHARED_SYSTEM)}
    expected |= set() if alone or scoped else {*syscalls.SIGNALS}
    assert refused == expected & set(numbers)
    assert answer("clone3") == 0x00050000 | errno.ENOSYS
    assert (
        answer("clone", 0x00050F00),
        answer("clone", 0x10000000),
        answer("clone", 0x20000011),
    ) == (
        ALLOW,
        REFUSE,
        REFUSE,
    )
    assert (answer("socketpair", 1), answer("socketpair", 2)) == (ALLOW, REFUSE)
    assert answer("prlimit64", 0) == ALLOW
    assert answer("prlimit64", 1) == (ALLOW if alone else REFUSE)
    assert answer("tgkill", 77) == ALLOW
    assert answer("tgkill", 78) == (ALLOW if alone or scoped else REFUSE)
    assert decide(program, 0, 0, ARCHITECTURES[machine]) == ALLOW


def test_calls_of_another_architecture_end_the_process() -> None:
    program = seccomp.program("x86_64", alone=True, signals_are_scoped=True, pid=1)
    assert decide(program, 41, 0, 0x40000003) == KILL
    assert decide(program, 0x40000000 + 41, 0, ARCHITECTURES["x86_64"]) == 0x00050000 | errno.ENOSYS
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64", alone=True, signals_are_scoped=True, pid=1)
