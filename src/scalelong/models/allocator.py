"""Memory that a step frees and the next one takes again."""

import ctypes

# Names of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """For loops on a CPU: keep what a step frees for the next one; False where the C library is not glibc.

    Call it once, before the first step; it holds for the whole process. `scalelong train` does so itself. A step
    allocates the same large tensors again and again. By default, glibc takes each from the system and gives it back:
    the system must clear every page, and each time one thread gives memory back, the others wait.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, LARGEST))
