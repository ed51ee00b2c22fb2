"""Named segments of host memory that two processes map.

The owner creates a segment and holds a lock on its file as long as it lives, so that a file whose
lock can be had is of a process that is gone, and whoever creates the next segment removes it. Not
`multiprocessing.shared_memory`: its resource tracker unlinks a segment when any process that
mapped it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError

FOLDER = Path("/dev/shm")
NAME = re.compile(r"slipstream-[0-9a-f]{16}-(flags|memory)")


class Segment:
    """A mapped segment, whole pages, zero when created.

    Attributes:
        words: (size / 8,) int64 over it. An assignment to an element is one aligned store.
        address: of the mapping in this process.
        size: in bytes, a multiple of the page.
    """

    def __init__(self, name: str, size: int, fd: int, owner: bool) -> None:
        self.name = name
        self.size = _pages(size)
        self._fd = fd if owner else None
        self.buffer = mmap.mmap(fd, self.size, mmap.MAP_SHARED)
        self.words: NDArray[np.int64] = np.frombuffer(self.buffer, np.int64)
        self.address = int(self.words.ctypes.data)

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """A new segment of this process; removes those of processes that are gone.

        Raises ConfigError where there is no room for it.
        """
        assert NAME.fullmatch(name), name
        sweep()
        try:
            fd = _create_locked(FOLDER / name)
        except OSError as error:
            raise ConfigError(f"cannot create {FOLDER / name}: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, _pages(size))  # else the first access of a full disk kills
            return cls(name, size, fd, owner=True)
        except OSError as error:
            (FOLDER / name).unlink(missing_ok=True)
            os.close(fd)
            raise ConfigError(f"no room for {size} bytes in {FOLDER}: {error.strerror}") from error

    @classmethod
    def open(cls, name: str, size: int) -> Segment:
        """Maps another process's segment.

        Raises ConfigError when there is none of this name, user and size.
        """
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not the name of a segment")
        try:
            fd = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot open {FOLDER / name}: {error.strerror}") from error
        try:
            state = os.fstat(fd)
            if state.st_uid != os.geteuid() or state.st_size < _pages(size):
                raise ConfigError(
                    f"{FOLDER / name}: {state.st_size} bytes of user {state.st_uid}, "
                    f"not {_pages(size)} of {os.geteuid()}"
                )
            return cls(name, size, fd, owner=False)
        finally:
            os.close(fd)  # the mapping has its own

    def close(self) -> None:
        """Gives it up; the mapping goes with its last user. The owner's file is removed."""
        self.words = np.zeros(0, np.int64)
        del self.buffer
        if self._fd is not None:
            (FOLDER / self.name).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def owned(name: str) -> bool:
    """Whether the owner of a segment holds it; also where its process has no number here."""
    try:
        fd = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def sweep() -> None:
    """Removes the segments of processes that are gone."""
    for path in FOLDER.glob("slipstream-*"):
        if not NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone by now
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:  # else another sweep was here, and the name may be new
                path.unlink(missing_ok=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(fd)


def _create_locked(path: Path) -> int:
    """A new file whose lock this process holds."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # somebody's sweep had the lock first


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
