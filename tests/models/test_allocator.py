"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, resource, torch
from scalelong.models.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):
    torch.zeros(16_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.zeros(16_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_is_not_taken_from_the_system_again():
    assert faults("keep") * 10 < faults("leave")
