"""Engines: what they refuse, what they start, and that a sweep comes to the same end on each of them."""

import _thread
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelong.cli import find_command, main
from scalelong.cli.shared import engine_of
from scalelong.config import TrainConfig, dump_config, recipe
from scalelong.errors import InvalidConfigError, MissingDependencyError, RunFailedError
from scalelong.experiments import PlannedRun, config_range, engines, make_engine, plan_runs, run_all, sweeps
from scalelong.experiments.__main__ import do
from scalelong.experiments.engines import Job, LocalEngine, OnNode

TIMES = ("seconds", "seconds_per_step", "images_per_second")


def tiny(steps: int = 4) -> TrainConfig:
    base = recipe("digits-tiny")
    return replace(
        base,
        steps=steps,
        batch_size=4,
        model_options={"patch_size": 4, "dim": 8, "depth": 2, "heads": 2},
        images=replace(base.images, held_out=8),
        logging=replace(base.logging, log_every=1, held_out_every=steps, samples_every=0, monitor_every=4, trackers=()),
        checkpoints=replace(base.checkpoints, save_every=2, keep_last=1),
    )


def two(folder: Path) -> list[PlannedRun]:
    return plan_runs(tiny(), ["none", "ls"], [0], folder)


def result(run: PlannedRun) -> tuple[bytes, list[dict[str, object]]]:
    """The weights at the end, and all that was recorded but for times."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    weights = run.folder / "checkpoints" / "latest" / "model.safetensors"
    return weights.read_bytes(), [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Two runs, one after the other, in this process."""
    runs = two(tmp_path_factory.mktemp("undisturbed"))
    assert run_all(runs, jobs=1)
    return runs


# What is refused, before anything is written


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cloud", {}, "known: local, submitit, slurm, ray"),
        ("local", {"options": {"partition": "gpu"}}, "no `options`"),
        ("submitit", {"options": {"time": "4h"}}, "in minutes"),
        ("local", {"jobs": 0}, "`jobs` must be at least 1"),
    ],
)
def test_options_that_an_engine_does_not_have_are_refused(name, options, message):
    pytest.importorskip("submitit")
    with pytest.raises(InvalidConfigError, match=message):
        make_engine(name, **options).check()


@pytest.mark.parametrize(("engine", "package", "extra"), [("slurm", "submitit", "slurm"), ("ray", "ray", "ray")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, capsys, engine, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"{package}.*scalelong\[{extra}\]"):
        make_engine(engine).check()
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny()))
    flags = ["--config", str(tmp_path / "tiny.yaml"), "--seeds", "1", "--engine", engine]
    assert main(["compare", *flags, "--out", str(tmp_path / "out")]) == 1
    assert f"scalelong[{extra}]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_clusters_and_gpus_that_are_not_there(tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise ConnectionError("nothing listens")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=refuse))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RunFailedError, match=r"127.0.0.1:1.*ray start"):
        make_engine("ray").check()
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFailedError, match=r"sbatch.*login node"):
        make_engine("slurm").check()
    monkeypatch.setattr(engines, "devices", lambda: ["0", "1"])
    make_engine("local", gpus=2).check()
    with pytest.raises(RunFailedError, match=r"`gpus` 3.*found 2"):
        make_engine("local", gpus=3).check()


def test_the_flags_of_a_command_reach_the_engine():
    words = "--engine slurm --jobs 3 --cpus-per-run 2 --gpus-per-run 1 --engine-options partition=gpu time=240"
    engine = engine_of(find_command("compare").parser().parse_args(words.split()))
    assert (engine.name, engine.jobs, engine.cpus, engine.gpus) == ("slurm", 3, 2, 1)
    assert engine.options == {"partition": "gpu", "time": 240}


# This machine: a run per core, or per GPU


def test_each_run_gets_a_gpu_of_its_own(monkeypatch):
    started: list[str] = []

    class Process:
        def __init__(self, job, more):
            self.code = None
            started.append(f"{job.name}:{more['CUDA_VISIBLE_DEVICES']}")

        def poll(self):
            return self.code

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-6b1f,7")
    monkeypatch.setattr(engines, "Worker", Process)
    engine = LocalEngine()
    assert engine.at_once(10) == 3
    first, second, third, fourth = (Job(name, Path(), Path("log")) for name in "abcd")
    processes = [engine.start(job) for job in (first, second, third)]
    processes[1].code = 0
    engine.start(fourth)
    assert started == ["a:2", "b:GPU-6b1f", "c:7", "d:GPU-6b1f"]
    two = LocalEngine(gpus=2)
    assert two.at_once(10) == 1
    two.start(first)
    assert started[-1] == "a:2,GPU-6b1f"
    assert LocalEngine(gpus=0).at_once(10) == min(10, engines.cores())
    parallel = Job("a", Path("/sweep/jobs/a.json"), Path("log"), processes=4)
    assert parallel.arguments[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]


def test_options_go_to_submitit_or_to_sbatch(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    given: dict[str, object] = {}

    def submit(executor, _):
        given.update(executor._executor.parameters, folder=executor.folder)
        return SimpleNamespace(done=lambda: False)

    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _: 2))
    monkeypatch.setattr("shutil.which", lambda _: "/bin/sbatch")
    monkeypatch.setattr(submitit.AutoExecutor, "submit", submit)
    engine = make_engine("slurm", gpus=2, options={"partition": "gpu", "account": "lab", "licenses": "a", "time": 240})
    engine.check()
    engine.start(Job("depth-2/none", tmp_path / "jobs" / "depth-2" / "none.json", tmp_path / "log"))
    wanted = {"partition": "gpu", "account": "lab", "time": 240, "gpus_per_node": 2, "cpus_per_task": 1}
    assert wanted.items() <= given.items()
    assert given["additional_parameters"] == {"licenses": "a"}
    assert given["folder"] == tmp_path / "jobs" / "submitit"


# Sweeps


def test_a_sweep_keeps_its_number_of_threads(tmp_path, caplog):
    assert sweeps.agreed_threads(LocalEngine(cpus=3), tmp_path, 1) == 3
    assert sweeps.agreed_threads(LocalEngine(), tmp_path, 1) == 3
    assert "began with" not in caplog.text
    assert sweeps.agreed_threads(LocalEngine(cpus=1), tmp_path, 1) == 1
    assert "began with 3 thread(s)" in caplog.text


def test_status(undisturbed, tmp_path, capsys):
    folder = undisturbed[0].folder.parent
    assert main(["compare", "--status", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "4/4" in printed
    assert "2 runs: 2 finished" in printed
    assert main(["compare", "--status", "--out", str(tmp_path)]) == 1
    sweeps.make_job(tmp_path, "a", {**json.loads((folder / "jobs" / "none-seed0.json").read_text()), "folder": "../a"})
    assert "1 runs: 1 waiting" in sweeps.status_text(tmp_path)


class Ray:
    """Tasks of threads, where Ray is not installed."""

    exceptions = SimpleNamespace(RayError=RuntimeError)
    is_initialized = staticmethod(lambda: True)
    get = staticmethod(lambda task: task.result())
    wait = staticmethod(lambda tasks, timeout: ([task for task in tasks if task.done()], []))

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(3)

    def remote(self, function):
        options = SimpleNamespace(remote=lambda given: self.pool.submit(function, given))
        return SimpleNamespace(options=lambda **_: options)


@pytest.mark.parametrize("name", ["local", "submitit", "ray"])
def test_a_sweep_that_was_killed_is_continued(name, tmp_path, undisturbed, monkeypatch):
    """One run is killed; on submitit the other one is preempted before, and goes on. What comes out is the same."""
    if name == "submitit":
        pytest.importorskip("submitit")
    if name == "ray":
        monkeypatch.setitem(sys.modules, "ray", Ray())
    runs, wanted, done = two(tmp_path), 1 + (name == "submitit"), {}
    monkeypatch.setattr(sweeps, "POLL_SECONDS", 0.05)

    def disturb() -> None:
        until = time.monotonic() + 300
        while len(done) < wanted and time.monotonic() < until:
            for run in runs:
                holder = run.folder / ".lock-holder"
                words = holder.read_text().split() if holder.exists() else []
                if len(words) < 4 or int(words[1]) in done.values() or run.name in done or len(done) == wanted:
                    continue
                process = done[run.name] = int(words[1])
                if len(done) < wanted:
                    parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
                    os.kill(int(parent), signal.SIGUSR2)
                else:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

    thread = threading.Thread(target=disturb)
    thread.start()
    with pytest.raises(RunFailedError, match="was killed or lost"):
        run_all(runs, engine=make_engine(name, jobs=2, cpus=1))
    thread.join()
    assert len(done) == wanted
    assert len([run for run in runs if run.finished]) < 2
    # On Ray again; the others in this process, which is quicker.
    assert run_all(runs, engine=make_engine("ray" if name == "ray" else "local", jobs=1, cpus=1))
    assert [result(run) for run in runs] == [result(run) for run in undisturbed]


class Here(LocalEngine):
    """Does jobs in this process."""

    def start(self, job):
        assert do(job.file)
        return SimpleNamespace(poll=lambda: 0)


def test_a_range_in_jobs_is_that_of_this_process(tmp_path, capsys):
    wanted = {"rates": (1e-3, 1e-2), "methods": ("none", "cs"), "seeds": 1, "steps": 6}
    config_range(tiny(), **wanted, jobs=1, out=tmp_path / "here")
    config_range(tiny(), **wanted, out=tmp_path / "there", engine=Here())
    here, there = (
        sorted(
            str({**json.loads(line), "seconds": 0})
            for line in (tmp_path / name / "runs.jsonl").read_text().splitlines()
        )
        for name in ("here", "there")
    )
    assert here == there
    assert (tmp_path / "there" / "range.json").exists()
    assert main(["range", "--out", str(tmp_path / "there"), "--steps", "8", "--seeds", "1"]) == 1
    assert "holds runs with other settings" in capsys.readouterr().err


SAVES = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path("saved").write_text("all")
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(60)
"""


def test_a_ray_task_that_is_cancelled_lets_its_worker_save(tmp_path, monkeypatch):
    """Ray interrupts the main thread, which does not wake a process that waits in a system call."""

    def cancel() -> None:
        until = time.monotonic() + 30
        while not (log.exists() and log.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        _thread.interrupt_main()

    log = tmp_path / "logs" / "a.txt"
    monkeypatch.setattr(Job, "arguments", ["-c", SAVES])
    thread = threading.Thread(target=cancel)
    # Tests that are started in the background have SIGINT ignored, and Ray's interrupt with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            OnNode(Job("a", tmp_path, log, cwd=str(tmp_path)))()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").read_text() == "all"
    monkeypatch.setattr(Job, "arguments", ["-c", "raise SystemExit(7)"])
    assert OnNode(Job("a", tmp_path, log))() == 7


def test_ray_of_two_nodes_gives_the_same(tmp_path, undisturbed, monkeypatch):
    """A cluster of two nodes on this machine. Ray is large, and not among the packages of the tests."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'scalelong[ray]' to run this")
    cluster = pytest.importorskip("ray.cluster_utils").Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        runs = two(tmp_path)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert run_all(runs, engine=make_engine("ray", cpus=1))
        assert [result(run) for run in runs] == [result(run) for run in undisturbed]
    finally:
        cluster.shutdown()
