"""On what, and how undisturbed, something was measured."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scalelong._version import __version__

from .settings import cores

PACKAGES = ("torch", "diffusers", "accelerate", "numpy")
BUSY = 0.25
"""Load per core, before a measurement, from which the machine counts as busy."""


def describe_machine(threads: int) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": threads,
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "scalelong": __version__,
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def machine_line(machine: dict[str, Any]) -> str:
    size = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    return (
        f"{machine['cpu']}, {machine['cores']} core(s){size}, {machine['threads']} thread(s), "
        f"torch {machine.get('torch', '?')}, Python {machine['python']}, scalelong {machine['scalelong']}"
    )


def load() -> float | None:
    """Processes that wanted a core in the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def busy_warning(before: float | None) -> str | None:
    if before is None or before <= BUSY * cores():
        return None
    return (
        f"the machine was busy: a load of {before:.2f} on {cores()} core(s) before the measurement; the ratios are "
        f"less certain, and times are longer, than on a quiet one"
    )


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
