"""Host memory: how much this process may use, and how the allocator treats what is freed."""

import contextlib
import ctypes
from pathlib import Path

# A control group without a limit reports a number near the largest one (version 1) or "max" (2).
_UNLIMITED = 1 << 60

# Parameters of glibc's mallopt(3), from <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER_TRIM = (1 << 31) - 1


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _control_group_headroom(root: Path) -> int | None:
    """Bytes left below the memory limit of the control group mounted at `root`, None without one."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = _read_number(root / limit_file)
        usage = _read_number(root / usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            return max(0, limit - usage)
    return None


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that can be allocated now without swapping; 0 where the kernel does not tell.

    The smaller of the machine's MemAvailable and what the control group leaves.
    """
    available = 0
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    headroom = _control_group_headroom(control_group)
    return available if headroom is None else min(available, headroom)


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep what is freed instead of giving it back to the kernel.

    XLA:CPU allocates the temporaries of a program at each call. Large ones would be mapped anew each
    time, and the kernel would clear page after page: for a vocabulary projection that is more time
    than the matrix product itself. The price is that memory stays at its peak. Call before threads
    start; they would have arenas of their own, which cannot hold large blocks.
    Returns whether the allocator agreed (another one than glibc's does not).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = ((_M_TRIM_THRESHOLD, _NEVER_TRIM), (_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def return_freed_memory() -> None:
    """Give what is free now back to the kernel, once, after a start that needed more than serving does."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
