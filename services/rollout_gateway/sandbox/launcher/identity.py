"""User ids and capabilities of the code.

A root gateway gives each run a user id that no other process has. Only the run's processes can then
be signalled, no file of root can be written, and the process limit counts the run alone. Any other
gateway has no id to give, and the code keeps the gateway's.
"""

from __future__ import annotations

import contextlib
import os

from . import linux

_OWN_IDS = 0x7000_0000
_NEWEST_ID = 1 << 22  # Linux process ids are below


def own_id() -> int | None:
    """A user id for this run alone, from this process's number; None if none is available."""
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
    # A container with a small map: its upper half, so that parallel runs seldom share an id.
    return start + count // 2 + os.getpid() % (count // 2 - 1) if count > 4096 else None


def become(user: int | None, *, read_everything: bool) -> None:
    """Takes that user and group, without other groups, and drops every capability and every way to
    gain one.

    `read_everything` keeps one capability: reading files of any owner. Landlock still selects the
    files. Raises OSError.
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
    """Lines of a namespace's map: 0 is a root launcher, 1 is the code."""
    return f"0 0 1\n1 {user} 1\n" if user is not None else f"1 {own} 1\n"


def tasks_of(user: int) -> int:
    """Number of threads under a user id now; the process limit counts them."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total
