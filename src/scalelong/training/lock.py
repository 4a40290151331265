"""One process at a time in a run folder. The kernel drops the lock when its holder dies, so it cannot go stale."""

import fcntl
import os
import socket
from pathlib import Path

from ..errors import RunLockedError

_HELD: set[Path] = set()
"""Folders locked by this process; the kernel's locks do not see a second attempt from within."""


class FolderLock:
    """Record locks (`lockf`), not `flock`: a forked data worker that outlives its parent must not keep the lock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / ".lock"

    def __enter__(self) -> "FolderLock":
        if self.path in _HELD:
            raise self._refusal("this process")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise self._refusal(holder or "another process") from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _HELD.add(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        _HELD.discard(self.path)
        os.close(self._descriptor)

    def _refusal(self, holder: str) -> RunLockedError:
        return RunLockedError(
            f"{self.path.parent} is in use by {holder}; wait for it, stop it, or choose another folder with --out"
        )
