"""Keeps freed memory in the process, so that a step does not fault its pages in again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1 << 20


def keep_heap() -> bool:
    """Tells glibc to serve blocks of up to 32 MiB from its heap and to give none of it back.

    By default it maps and unmaps blocks from 128 KiB on, and a step on a CPU may then spend more
    time on page faults than on arithmetic. Call it once, early. Returns False where malloc is not
    glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    wanted = ((_M_MMAP_THRESHOLD, 32), (_M_TRIM_THRESHOLD, 2047), (_M_TOP_PAD, 16))
    accepted = [mallopt(option, mib * _MIB) == 1 for option, mib in wanted]
    return all(accepted)
