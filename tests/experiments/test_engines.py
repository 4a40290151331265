"""Engines: what they refuse, what they start, and that a sweep comes to the same end on each of them."""

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelong.cli import main
from scalelong.config import TrainConfig, dump_config, recipe
from scalelong.errors import EngineError, InvalidConfigError, MissingDependencyError, RunFailedError
from scalelong.experiments import (
    ENGINES,
    PlannedRun,
    engines,
    make_engine,
    plan_runs,
    ray_engine,
    run_all,
    status_text,
    sweeps,
    worker,
)
from scalelong.experiments.engines import Job, LocalEngine
from scalelong.experiments.ray_engine import RayEngine
from scalelong.experiments.submitit_engine import SubmititEngine, minutes_of

TIMES = ("seconds", "seconds_per_step", "images_per_second")


def tiny(steps: int = 4) -> TrainConfig:
    base = recipe("digits-tiny")
    return replace(
        base,
        steps=steps,
        batch_size=4,
        model_options={"patch_size": 4, "dim": 8, "depth": 2, "heads": 2},
        images=replace(base.images, held_out=8),
        logging=replace(base.logging, log_every=1, held_out_every=steps, samples_every=0, trackers=()),
        checkpoints=replace(base.checkpoints, save_every=2, keep_last=1),
    )


def three(folder: Path) -> list[PlannedRun]:
    return plan_runs(tiny(), ["none", "cs:0.7", "ls"], [0], folder)


def result(run: PlannedRun) -> tuple[bytes, list[dict[str, object]]]:
    """The weights at the end, and all that was recorded but for times."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    weights = run.folder / "checkpoints" / "latest" / "model.safetensors"
    return weights.read_bytes(), [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Three runs, one after the other, in this process."""
    runs = three(tmp_path_factory.mktemp("undisturbed"))
    assert run_all(runs, 4, jobs=1)
    return runs


# What is refused, before anything is written


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("4:00:00", 240), ("30:30", 31), ("2-0", 2880), ("1-12:30", 2190), ("0:00:59", 1)],
)
def test_time_limits_are_written_as_slurm_writes_them(text, minutes):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "0", "-5", "4h"])
def test_other_time_limits_are_refused(text):
    with pytest.raises(InvalidConfigError, match="`time`"):
        minutes_of(text)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cloud", {}, "known: local, submitit, slurm, ray"),
        ("local", {"partition": "gpu"}, "`partition` is an option of the engine slurm"),
        ("slurm", {"address": "auto"}, "`address` is an option of the engine ray"),
        ("ray", {"detach": True}, "`detach`"),
        ("ray", {"options": {"memory": "much"}}, "memory=8e9"),
        ("local", {"jobs": 0}, "`jobs` must be at least 1"),
    ],
)
def test_options_that_an_engine_does_not_have_are_refused(name, options, message):
    with pytest.raises(InvalidConfigError, match=message):
        make_engine(name, **options)


def test_every_engine_has_a_name():
    assert [make_engine(name).name for name in ENGINES] == list(ENGINES)


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


def test_slurm_needs_sbatch(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"sbatch.*login node"):
        make_engine("slurm").check()


def test_ray_tasks_that_fit_no_node_are_refused(monkeypatch):
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0, "node:1": 1.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes))
    RayEngine(cpus=2).check()
    for options in ({"cpus": 4}, {"gpus": 1}, {"options": {"ssd": 1}}):
        with pytest.raises(EngineError, match="no node"):
            RayEngine(**options).check()  # type: ignore[arg-type]


def test_a_ray_cluster_that_is_not_there(monkeypatch):
    def refuse(**_: object) -> None:
        raise ConnectionError("nothing listens")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=refuse))
    with pytest.raises(EngineError, match=r"127.0.0.1:1.*ray start"):
        RayEngine(address="127.0.0.1:1").check()


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(engines, "devices", lambda: ["0", "1"])
    make_engine("local", gpus=2).check()
    with pytest.raises(EngineError, match=r"`gpus_per_run` 3.*found 2"):
        make_engine("local", gpus=3).check()


# This machine: a run per core, or per GPU


def test_each_run_gets_a_gpu_of_its_own(monkeypatch, tmp_path):
    started: list[str] = []

    def start(job, more):
        started.append(f"{job.name}:{more['CUDA_VISIBLE_DEVICES']}")
        return subprocess.Popen(["true"], stdin=subprocess.PIPE)

    monkeypatch.setattr(engines, "devices", lambda: ["2", "5", "7"])
    monkeypatch.setattr(engines, "start_worker", start)
    engine = LocalEngine()
    assert engine.at_once(10) == 3
    engine.submit([Job(name, Path(), Path("log")) for name in "abcde"], tmp_path)
    assert started == ["a:2", "b:5", "c:7"]
    ended: dict[str, int | None] = {}
    until = time.monotonic() + 30
    while len(ended) < 5 and time.monotonic() < until:
        ended |= engine.ended()
    assert ended == dict.fromkeys("abcde", 0)
    assert len(started) == 5
    started.clear()
    two = LocalEngine(gpus=2)
    assert two.at_once(10) == 1
    two.submit([Job("f", Path(), Path("log"))], tmp_path)
    two.stop()
    assert started == ["f:2,5"]
    assert LocalEngine(gpus=0).at_once(10) == min(10, engines.cores())


def test_gpus_are_named_as_the_variable_names_them(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6b1f")
    assert engines.devices() == ["4", "GPU-6b1f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert engines.devices() == ["0", "1"]


def test_several_gpus_for_one_run_use_torchrun():
    job = Job("a", Path("/sweep/jobs/a.json"), Path("log"), processes=4)
    assert job.arguments[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]


# SLURM's queue


def test_jobs_of_an_earlier_command_are_followed(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    submitted: list[str] = []

    class Executor:
        _valid_parameters = submitit.SlurmExecutor._valid_parameters

        def __init__(self, **_: object) -> None: ...

        def update_parameters(self, **given: object) -> None:
            self.given = given

        def batch(self):
            return threading.Lock()

        def submit(self, function):
            submitted.append(function.job.name)
            return SimpleNamespace(job_id=f"9_{len(submitted)}", done=lambda: True)

    states = {"7_0": "COMPLETED", "7_1": "RUNNING"}
    monkeypatch.setattr(submitit, "SlurmExecutor", Executor)
    monkeypatch.setattr(
        submitit, "SlurmJob", lambda folder, job_id: SimpleNamespace(job_id=job_id, state=states[job_id])
    )
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "submitit.json").write_text(json.dumps({"a": "7_0", "b": "7_1"}))
    engine = SubmititEngine("slurm", partition="gpu", options={"account": "lab"})
    engine.submit([Job(name, Path(), Path("log")) for name in "abc"], tmp_path)
    assert submitted == ["a", "c"]
    assert json.loads((tmp_path / "jobs" / "submitit.json").read_text()) == {"b": "7_1", "a": "9_1", "c": "9_2"}


# Sweeps


def test_a_sweep_keeps_its_number_of_threads(tmp_path, caplog):
    assert sweeps.agreed_threads(LocalEngine(cpus=3), tmp_path, 1) == 3
    assert sweeps.agreed_threads(LocalEngine(), tmp_path, 1) == 3
    assert "began with" not in caplog.text
    assert sweeps.agreed_threads(LocalEngine(cpus=1), tmp_path, 1) == 1
    assert "began with 3 thread(s)" in caplog.text


def test_status(undisturbed, tmp_path, capsys):
    folder = undisturbed[0].folder.parent
    assert "3 runs: 3 finished" in status_text(folder)
    assert main(["compare", "--status", "--out", str(folder)]) == 0
    assert "4/4" in capsys.readouterr().out
    assert main(["compare", "--status", "--out", str(tmp_path)]) == 1
    longer = replace(undisturbed[0], config=replace(undisturbed[0].config, steps=8))
    sweeps.write_job(tmp_path, "a", {**json.loads((folder / "jobs" / "none-seed0.json").read_text()), "folder": "../a"})
    assert "1 runs: 1 waiting" in status_text(tmp_path)
    assert not longer.finished
    assert not longer.at_work


def test_submitit_killed_and_preempted_then_continued_here(tmp_path, undisturbed, monkeypatch):
    """Three jobs on submitit's local executor. One is killed; another is preempted, and goes on."""
    pytest.importorskip("submitit")
    runs = three(tmp_path)
    monkeypatch.setattr(sweeps, "POLL_SECONDS", 0.05)
    done: dict[str, int] = {}

    def disturb() -> None:
        until = time.monotonic() + 300
        while len(done) < 2 and time.monotonic() < until:
            for run in runs:
                holder = run.folder / ".lock-holder"
                words = holder.read_text().split() if holder.exists() else []
                if len(words) < 4 or int(words[1]) in done.values() or f"{run.name} preempted" in done:
                    continue
                process = int(words[1])
                if not done:
                    parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
                    os.kill(int(parent), signal.SIGUSR2)
                    done[f"{run.name} preempted"] = process
                else:
                    os.kill(process, signal.SIGKILL)
                    done["killed"] = process
            time.sleep(0.01)

    thread = threading.Thread(target=disturb)
    thread.start()
    with pytest.raises(RunFailedError, match="was killed or lost"):
        run_all(runs, 4, engine=make_engine("submitit", jobs=2, cpus=1))
    thread.join()
    assert len(done) == 2
    assert 0 < len([run for run in runs if run.finished]) < 3
    assert run_all(runs, 4, jobs=1)
    assert [result(run) for run in runs] == [result(run) for run in undisturbed]


def test_a_range_in_jobs_is_that_of_this_process(tmp_path, capsys, monkeypatch):
    from scalelong.experiments import config_range

    class Here(LocalEngine):
        """Does jobs in this process."""

        def submit(self, jobs, folder):
            self.over: dict[str, int | None] = {job.name: worker.main([str(job.file)]) for job in jobs}

        def ended(self):
            found, self.over = self.over, {}
            return found

    monkeypatch.setattr(worker, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15))
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


def test_a_ray_task_that_is_cancelled_lets_its_worker_save(tmp_path):
    """Ray interrupts the main thread, which does not wake a process that waits in a system call."""

    def cancel() -> None:
        until = time.monotonic() + 30
        while not (log.exists() and log.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        _thread.interrupt_main()

    log = tmp_path / "logs" / "a.txt"
    thread = threading.Thread(target=cancel)
    # Tests that are started in the background have SIGINT ignored, and Ray's interrupt with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ray_engine.task()(["-c", SAVES], {}, str(tmp_path), str(log))
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").read_text() == "all"
    assert ray_engine.task()(["-c", "raise SystemExit(7)"], {}, str(tmp_path), str(log)) == 7


def test_ray_of_two_nodes_gives_the_same(tmp_path, undisturbed):
    """A cluster of two nodes on this machine. Ray is large, and not among the packages of the tests."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'scalelong[ray]' to run this")
    cluster = pytest.importorskip("ray.cluster_utils").Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        runs = three(tmp_path)
        assert run_all(runs, 4, engine=make_engine("ray", address=cluster.address, cpus=1))
        assert not ray.is_initialized()
        assert [result(run) for run in runs] == [result(run) for run in undisturbed]
    finally:
        cluster.shutdown()
