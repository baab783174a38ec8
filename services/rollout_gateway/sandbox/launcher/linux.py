"""Linux calls that Python lacks, by ctypes, and the numbers of refused system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Mapping

Table = Mapping[str, tuple[int, int]]  # name: (x86_64, aarch64); 0 if the call does not exist

ALWAYS: Table = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),  # really 0 on aarch64, which this table cannot express
    "io_submit": (209, 2),
    "inotify_init": (253, 0),
    "inotify_init1": (294, 26),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "personality": (135, 92),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "lookup_dcookie": (212, 18),
    "iopl": (172, 0),
    "ioperm": (173, 0),
    "uselib": (134, 0),
    "modify_ldt": (154, 0),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
"""Refused everywhere: sockets, memory of other processes, memory and files outside of any process's
size, mounts, namespaces, kernel modules, clock, lasting IPC, and calls that wake or stall the whole
host.
"""

SHARED_SYSTEM: Table = {
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "chmod": (90, 0),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 0),
    "fchown": (93, 55),
    "lchown": (94, 0),
    "fchownat": (260, 54),
    "utime": (132, 0),
    "utimes": (235, 0),
    "futimesat": (261, 0),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
    "file_setattr": (469, 469),
}
"""Refused without namespaces only. Landlock does not govern changes of modes, owners and times, nor
actions on processes of the same user. Without a new session, one signal reaches all of the code.
"""

SIGNALS: Table = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
"""Refused if neither a pid namespace nor Landlock confines signals to the code's own processes."""

WITH_CONDITIONS: Table = {
    "socketpair": (53, 199),
    "clone": (56, 220),
    "clone3": (435, 435),
    "prlimit64": (302, 261),
    "tgkill": (234, 131),
    "mmap": (9, 222),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
}
"""Refused with some arguments."""

UNKNOWN = 470
"""Numbers from here on are newer than these lists: refused as by a kernel without them."""


def numbers(machine: str, table: Table) -> dict[str, int]:
    """Numbers by name, for the calls of the architecture.

    Raises OSError for an unknown architecture.
    """
    columns = {"x86_64": 0, "aarch64": 1}
    if machine not in columns:
        raise OSError(f"system calls of {machine} are not known; known: {', '.join(columns)}")
    known = {name: row[columns[machine]] for name, row in table.items()}
    return {name: number for name, number in known.items() if number}


PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_SET_THP_DISABLE = 41
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2

CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63

MACHINE = platform.machine()

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """A system call by its number; plain numbers are passed as longs.

    Raises OSError with the name in its text.
    """
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *passed))


def prctl(option: int, *arguments: object) -> None:
    """prctl(2). Raises OSError."""
    passed = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    rest = [ctypes.c_ulong(0)] * (4 - len(passed))
    _checked(f"prctl {option}", _libc.prctl(ctypes.c_int(option), *passed, *rest))


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    encoded = (source.encode(), target.encode(), kind.encode() or None)
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    _checked(f"mount {kind or source} at {target}", result)


def pivot_root(root: str) -> None:
    """Makes `root`, a mount point, the whole file system; the former one is gone.

    Raises OSError.
    """
    number = numbers(MACHINE, ALWAYS)["pivot_root"]
    os.chdir(root)
    syscall("pivot_root", number, ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked("umount2", _libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def set_capabilities(kept: int) -> None:
    """Sets permitted, effective and inheritable capabilities to the bits `kept`.

    Raises OSError.
    """
    words = struct.pack("=6I", *[kept & 0xFFFFFFFF] * 3, *[kept >> 32] * 3)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked("capset", _libc.capset(header, words))


def shrink_bounding_set(kept: int) -> None:
    """Limits capabilities gained by exec to `kept`; without CAP_SETPCAP there is nothing
    to gain.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        if not kept >> capability & 1:
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except (
                OSError
            ):  # none on this kernel, or not permitted: then no_new_privs alone applies
                continue
