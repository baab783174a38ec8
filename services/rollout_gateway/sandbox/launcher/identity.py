"""Whom the code runs as. Owns user ids and capabilities; not files.

A gateway that runs as root gives each run a user id of its own, which no other process has: then
nothing but the run's processes can be signalled, none of root's files written, and the limit of
processes counts the run's alone. Any other gateway has no id to give; the code keeps the gateway's.
"""

from __future__ import annotations

import contextlib
import os

from . import linux

_OWN_IDS = 0x7000_0000
_NEWEST_ID = 1 << 22  # process ids of Linux lie below


def own_id() -> int | None:
    """A user id for this run alone, from the number of this process; None where none can be had."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as table:
        ranges = [tuple(map(int, line.split())) for line in table]
    wanted = _OWN_IDS + os.getpid()
    if any(
        start <= _OWN_IDS and start + count > _OWN_IDS + _NEWEST_ID for start, _, count in ranges
    ):
        return wanted
    start, _, count = max(ranges, key=lambda one: one[2])
    # A container with a small map: its upper half, so that runs side by side seldom share an id.
    return start + count // 2 + os.getpid() % (count // 2 - 1) if count > 4096 else None


def become(user: int | None, *, read_everything: bool) -> None:
    """Take that user and group, without other groups, and give up every capability and every way to
    gain one.

    `read_everything` keeps one capability: reading files regardless of their owner. Landlock still
    decides which. Raises OSError.
    """
    kept = 1 << linux.CAP_DAC_READ_SEARCH if read_everything and user is not None else 0
    linux.shrink_bounding_set(kept)
    linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
    if user is not None:
        linux.prctl(linux.PR_SET_KEEPCAPS, 1)
        with contextlib.suppress(
            PermissionError
        ):  # a user namespace made without root forbids it; groups then map to none
            os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)

    linux.set_capabilities(kept)
    if kept:
        linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_RAISE, linux.CAP_DAC_READ_SEARCH)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def id_map(user: int | None, own: int) -> str:
    """Lines of a namespace's map: 0 is the launcher where it is root, 1 is the code."""
    return f"0 0 1\n1 {user} 1\n" if user is not None else f"1 {own} 1\n"


def tasks_of(user: int) -> int:
    """Threads that run under a user id now; the limit of processes counts them."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total
