"""Tasks of a Ray cluster.

A task whose node is lost begins again elsewhere, and its run goes on after its last checkpoint.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfigError
from ..files import in_words
from ..optional import needs
from .engines import Engine, Job

RETRIES = 3
"""A task is begun again so often when its node is lost."""
GRACE_SECONDS = 60.0
"""Runs that are to stop may take so long to save."""


class RayEngine(Engine):
    """Ray by the address of its cluster; `options` are amounts of further resources, such as {"memory": 8e9}."""

    name = "ray"

    def __init__(self, *, address: str | None = None, options: Mapping[str, Any] | None = None, **share: Any) -> None:
        super().__init__(**share)
        self.address = address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            self.resources = {name: float(value) for name, value in (options or {}).items()}
        except (TypeError, ValueError) as error:
            raise InvalidConfigError(
                f"`engine_options` of Ray are amounts of resources, such as memory=8e9 or fast_disk=1: {error}"
            ) from error
        self._queue: list[Job] = []
        self._active: dict[Any, str] = {}
        self._ray: Any = None

    def check(self) -> None:
        self._ray = ray = needs("ray", "ray", "the engine ray")
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level="error")
            except Exception as error:  # Ray has errors of many kinds: no cluster, another version, a wrong password
                raise EngineError(
                    f"no Ray cluster can be used at `address` {self.address}: {in_words(error)}. Start one with `ray "
                    f"start --head`, and give the address HOST:PORT that it prints"
                ) from error
        wanted = {"CPU": self.cpus or 1, "GPU": self.gpus or 0, **self.resources}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= count for name, count in wanted.items()) for node in nodes):
            raise EngineError(  # the task would wait for ever
                f"no node of the Ray cluster has what a run asks for ({wanted}): lower `cpus_per_run`, `gpus_per_run` "
                f"or `engine_options`"
            )

    def submit(self, jobs: Sequence[Job], folder: Path) -> None:  # noqa: ARG002
        self._queue += jobs
        self._start()

    def ended(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        done = self._ray.wait(list(self._active), num_returns=len(self._active), timeout=0)[0] if self._active else []
        for reference in done:
            name = self._active.pop(reference)
            try:
                found[name] = self._ray.get(reference)
            except self._ray.exceptions.RayError:  # cancelled, or its node was lost too often
                found[name] = None
        self._start()
        return found

    def stop(self) -> None:
        self._queue.clear()
        for reference in self._active:
            self._ray.cancel(reference, force=False)
        if self._active:
            self._ray.wait(list(self._active), num_returns=len(self._active), timeout=GRACE_SECONDS)
        self._active.clear()
        self._ray.shutdown()

    def _start(self) -> None:
        others = {name: amount for name, amount in self.resources.items() if name != "memory"}
        asked = {"num_cpus": self.cpus or 1, "num_gpus": self.gpus or 0, "max_retries": RETRIES}
        remote = self._ray.remote(task())
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
        while self._queue and len(self._active) < (self.jobs or len(self._active) + 1):
            job = self._queue.pop(0)
            placed = remote.options(
                **asked, memory=self.resources.get("memory"), resources=others or None, name=job.name
            )
            given = [*job.arguments, "--tied"], {**job.environment, **path}, os.getcwd(), str(job.log)
            self._active[placed.remote(*given)] = job.name


def task() -> Any:
    """The function of a task. Made here, so that Ray sends its code to nodes without scalelong."""

    def run_command(arguments: list[str], environment: dict[str, str], folder: str, log: str) -> int:
        """On a node: a Python process with its own log, and its exit code."""
        import os
        import subprocess
        import sys
        import time

        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,  # open while this process lives; the worker saves and ends when it closes
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment},
            )
        try:
            # Not `wait`: Ray cancels a task by an interrupt that does not wake a process which waits in the system.
            while process.poll() is None:
                time.sleep(0.2)
        finally:
            process.terminate()
            process.communicate()
        return process.returncode

    return run_command
