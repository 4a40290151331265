"""Engines: what they refuse, what they start, and that a sweep comes to the same end on each of them."""

import _thread
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelong.cli import main
from scalelong.errors import EngineError, InvalidConfigError, MissingDependencyError, RunFailedError
from scalelong.experiments import clusters, engines, sweeps, worker
from scalelong.experiments.clusters import RayEngine, SlurmEngine, minutes_of
from scalelong.experiments.cost import cost_of, parse_step_time
from scalelong.experiments.engines import Job, LocalEngine, PrintedCommands
from scalelong.experiments.progress import read_progress
from scalelong.experiments.runs import PlannedRun, plan_runs
from scalelong.experiments.sweeps import ENGINES, description, make_engine, run_all, unit_of
from scalelong.experiments.units import Unit, shared, unit_at, units_of
from scalelong.runs import TrainConfig, dump_config, recipe

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


def twelve(folder: Path, steps: int = 4) -> list[PlannedRun]:
    return plan_runs(tiny(steps), ["none", "cs:0.7"], range(6), folder)


def result(run: PlannedRun) -> tuple[bytes, list[dict[str, object]]]:
    """The weights at the end, and all that was recorded but for times."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    weights = run.folder / "checkpoints" / "latest" / "model.safetensors"
    return weights.read_bytes(), [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Twelve runs, one after the other, in this process."""
    runs = twelve(tmp_path_factory.mktemp("undisturbed"))
    assert run_all(runs, 4, jobs=1)
    return runs


@pytest.fixture
def kept_signals():
    """A worker sets a handler, which must not stay."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# Names and options


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("4:00:00", 240), ("30:30", 31), ("2-0", 2880), ("1-12:30", 2190), ("0:00:59", 1)],
)
def test_time_limits_are_written_as_slurm_writes_them(text, minutes):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "0", "-5", "4h"])
def test_time_limits_that_are_none(text):
    with pytest.raises(InvalidConfigError, match="--time"):
        minutes_of(text)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cloud", {}, "known: local, submitit, slurm, ray"),
        ("local", {"partition": "gpu"}, "--partition says nothing to the engine local.*--engine slurm"),
        ("slurm", {"address": "auto"}, "--address says nothing to the engine slurm.*--engine ray"),
        ("submitit", {"options": {"account": "lab"}}, "--engine-options says nothing"),
        ("ray", {"detach": True}, "--detach"),
        ("local", {"jobs": 0}, "--jobs must be at least 1"),
        ("slurm", {"gpus": -1}, "--gpus-per-run"),
    ],
)
def test_what_an_engine_does_not_know_is_refused(name, options, message):
    with pytest.raises(InvalidConfigError, match=message):
        make_engine(name, **options)


def test_every_engine_has_a_name():
    assert [make_engine(name).name for name in ENGINES] == list(ENGINES)


# What is missing or cannot be reached is said, and nothing is written


@pytest.mark.parametrize(("engine", "package", "extra"), [("slurm", "submitit", "slurm"), ("ray", "ray", "ray")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, capsys, engine, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"{package}.*scalelong\[{extra}\]"):
        make_engine(engine).check()
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny()))
    flags = ["--config", str(tmp_path / "tiny.yaml"), "--seeds", "1", "--engine", engine]
    for command in ("compare", "range"):
        assert main([command, *flags, "--out", str(tmp_path / "out")]) == 1
        assert f"scalelong[{extra}]" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def fake_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_slurm_needs_its_commands_and_a_partition_that_exists(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(EngineError, match=r"sbatch.*login node"):
        SlurmEngine().check()
    for name in ("sbatch", "squeue", "scancel"):
        fake_program(tmp_path / "bin", name, "exit 0")
    fake_program(tmp_path / "bin", "sinfo", "echo 'small*|2:00:00'; echo 'large|infinite'")
    for partition, time_limit, minutes in ((None, None, 120), ("large", None, 1440), ("large", "3-0", 4320)):
        engine = SlurmEngine(partition=partition, time=time_limit)
        engine.check()
        assert engine.minutes == minutes
    with pytest.raises(EngineError, match=r"no partition 'huge'.*small, large"):
        SlurmEngine(partition="small,huge").check()
    fake_program(tmp_path / "bin", "sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(EngineError, match="Unable to contact"):
        SlurmEngine().check()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_ray_cluster_that_is_not_there(monkeypatch, address):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(EngineError, match=rf"nobody answers at --address {address}.*ray start"):
        RayEngine(address=address).check()
    with pytest.raises(InvalidConfigError, match="HOST:PORT"):
        RayEngine(address="somewhere").check()


def test_ray_tasks_that_fit_no_node_are_refused():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0, "node:1": 1.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    RayEngine(cpus=2)._require_fit(nodes, "auto")
    for options in ({"cpus": 4}, {"gpus": 1}, {"options": {"ssd": 1}}):
        with pytest.raises(EngineError, match=r"no node .* the most that one has: CPU 2"):
            RayEngine(**options)._require_fit(nodes, "auto")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match="memory=8e9"):
        RayEngine(options={"memory": "much"})._require_fit(nodes, "auto")


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(engines, "devices", lambda: ["0", "1"])
    make_engine("local", gpus=2).check()
    with pytest.raises(EngineError, match=r"--gpus-per-run 3.*found 2"):
        make_engine("local", gpus=3).check()


# Local: a run per core, or per GPU


def test_each_run_gets_a_gpu_of_its_own(monkeypatch):
    started: list[str] = []

    def start(job, more):
        started.append(f"{job.name}:{more['CUDA_VISIBLE_DEVICES']}")
        return subprocess.Popen(["true"], stdin=subprocess.PIPE)

    monkeypatch.setattr(engines, "devices", lambda: ["2", "5", "7"])
    monkeypatch.setattr(engines, "start_worker", start)
    engine = LocalEngine()
    assert engine.at_once(10) == 3
    engine.submit([Job(name, (), Path("log")) for name in "abcde"])
    assert started == ["a:2", "b:5", "c:7"]
    ended: dict[str, int | None] = {}
    until = time.monotonic() + 30
    while len(ended) < 5 and time.monotonic() < until:
        ended |= engine.poll()
    assert ended == dict.fromkeys("abcde", 0)
    assert len(started) == 5
    two = LocalEngine(gpus=2)
    assert two.at_once(10) == 1
    assert two._seen_by(0) == {"CUDA_VISIBLE_DEVICES": "2,5"}
    assert LocalEngine(gpus=0).at_once(10) == min(10, engines.cores())


def test_gpus_are_named_as_the_variable_names_them(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6b1f")
    assert engines.devices() == ["4", "GPU-6b1f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert engines.devices() == ["0", "1"]


def test_several_gpus_for_one_run_are_torchruns():
    job = Job("a", (Path("/sweep/jobs/a.json"),), Path("log"), {"OMP_NUM_THREADS": "3"}, processes=4)
    assert job.arguments[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    assert job.shell_line().startswith("OMP_NUM_THREADS=3 python -m torch.distributed.run")


# SLURM's queue, as `squeue` tells it


def test_a_job_is_over_when_the_queue_no_longer_has_it(monkeypatch):
    queue = {"7_0", "7_1"}
    monkeypatch.setattr(clusters, "_ask", lambda command, attempts=3: "\n".join(queue))
    monkeypatch.setattr(clusters, "ASK_SECONDS", 0.0)
    engine = SlurmEngine()
    done = SimpleNamespace(job_id="7_0", _get_outcome_and_result=lambda: ("success", 0))
    engine._active = {"a": done, "b": SimpleNamespace(job_id="7_1")}
    assert engine.poll() == {}
    queue.remove("7_0")
    assert engine.poll() == {}  # it may be on its way back into the queue
    queue.add("7_0")
    assert engine.poll() == {}
    queue.remove("7_0")
    engine.poll()
    assert engine.poll() == {"a": 0}
    assert set(engine._active) == {"b"}


def test_jobs_of_an_earlier_command_are_adopted(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(clusters, "_ask", lambda command, attempts=3: "7_1\n9_0\n")
    engine = SlurmEngine()
    engine._folder = tmp_path
    assert engine.adopt({"a": "7_0", "b": "7_1"}) == {"b"}


# Commands for everything else


def test_printed_commands_do_the_same_and_the_same_command_collects(tmp_path, capsys, kept_signals, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny(2)))
    command = ["compare", "--config", str(tmp_path / "tiny.yaml"), "--methods", "none,cs", "--seeds", "1"]
    command += ["--scores", "0", "--every", "2", "--out", str(tmp_path / "out"), "--step-time", "0.5"]
    assert main([*command, "--print-commands", "--cpus-per-run", "1"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert "2 runs, 4 steps to go; 0.5 s per step (given): 0.00056 core hours" in said.err
    assert f"collected by: scalelong {shlex.join(command)} --cpus-per-run 1" in said.err
    assert len(lines) == 2
    assert not list((tmp_path / "out").glob("*-seed0"))
    assert read_progress(tmp_path / "out").counts == {"waiting": 2}
    for line in lines:
        threads, mkl, python, _, module, *jobs = shlex.split(line)
        assert (threads, mkl, python, module) == (
            "OMP_NUM_THREADS=1",
            "MKL_NUM_THREADS=1",
            "python",
            "scalelong.experiments.worker",
        )
        monkeypatch.setattr(sys, "argv", ["worker"])
        assert worker.main(jobs) == 0
        assert worker.main(jobs) == 0  # a second time costs nothing
    assert "is finished already" in capsys.readouterr().out
    assert main([*command, "--jobs", "1"]) == 0
    said = capsys.readouterr()
    assert "2 of 2 runs are finished" in said.err
    assert "held-out loss" in said.out
    found = read_progress(tmp_path / "out")
    assert found.finished
    assert [run.where for run in found.runs] == [f"{socket.gethostname()}, shell"] * 2


def test_a_range_by_printed_commands_is_that_of_this_machine(tmp_path, capsys, kept_signals, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny()))
    command = ["range", "--config", str(tmp_path / "tiny.yaml"), "--methods", "none,cs", "--rates", "1e-3,1e-2"]
    command += ["--seeds", "1", "--steps", "6", "--step-time", "1"]
    # Engines train one by one.
    assert main([*command, "--out", str(tmp_path / "here"), "--jobs", "1", "--stack", "1"]) == 0
    assert main([*command, "--out", str(tmp_path / "there"), "--print-commands", "--runs-per-job", "4"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "worker" in line]
    monkeypatch.setattr(sys, "argv", ["worker"])
    assert worker.main(shlex.split(line)[5:]) == 0
    assert read_progress(tmp_path / "there").finished
    assert main([*command, "--out", str(tmp_path / "there"), "--print-commands"]) == 0
    here, there = (
        [{**json.loads(line), "seconds": 0} for line in (tmp_path / name / "runs.jsonl").read_text().splitlines()]
        for name in ("here", "there")
    )
    assert sorted(map(str, here)) == sorted(map(str, there))
    assert (tmp_path / "there" / "range.json").exists()
    # Results of other settings are none.
    assert main([*command, "--steps", "8", "--out", str(tmp_path / "there"), "--print-commands"]) == 1
    assert "holds runs with other settings" in capsys.readouterr().err


# Units and their states


def test_a_unit_at_work_is_known_by_its_process(tmp_path):
    unit = Unit(tmp_path, "rate-0.1/none-seed0")
    unit.write({"kind": "run", "folder": "../../rate-0.1/none-seed0"})
    assert unit_at(unit.job) == unit
    assert units_of(tmp_path) == [unit]
    assert unit.run_folder == tmp_path / "rate-0.1" / "none-seed0"
    assert unit.state.state == ""
    with unit.at_work("ray") as ending:
        assert unit.state.alive
        assert unit.state.process == os.getpid()
        ending.state = "interrupted"
    assert (unit.state.state, unit.state.engine, unit.state.alive) == ("interrupted", "ray", False)
    with pytest.raises(ValueError, match="broken"), unit.at_work():
        raise ValueError("broken")
    assert (unit.state.state, unit.state.message) == ("failed", "ValueError: broken")


def test_a_process_that_was_killed_is_lost(tmp_path):
    unit = Unit(tmp_path, "a")
    unit.write({"kind": "run", "folder": "../a", "config": {"steps": 10}, "command": ["scalelong", "compare"]})
    child = subprocess.Popen(["true"])
    child.wait()
    dead = {**asdict(unit.state), "state": "running", "host": socket.gethostname(), "process": child.pid}
    state = tmp_path / "jobs" / "a.state"
    state.write_text(json.dumps(dead))
    assert unit.state.silent
    assert read_progress(tmp_path).counts == {"lost": 1}
    # On another machine its beat counts.
    state.write_text(json.dumps({**dead, "host": "elsewhere"}))
    assert unit.state.alive
    os.utime(state, (time.time() - 1000, time.time() - 1000))
    assert unit.state.silent
    assert "to go on: scalelong compare" in str(read_progress(tmp_path))
    state.write_text("half of it")
    assert unit.state.state == ""
    unit.submitted("slurm", "12_3")
    assert unit.submission == ("slurm", "12_3")
    assert read_progress(tmp_path).counts == {"queued": 1}


def test_progress_of_runs(undisturbed, capsys):
    folder = undisturbed[0].folder.parent
    assert main(["progress", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "12 runs: 12 finished; 48 of 48 steps" in out
    assert main(["progress", str(folder), "--json", "--follow", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"finished": 12}
    assert main(["progress", str(undisturbed[0].folder)]) == 0
    assert "1 runs: 1 finished" in capsys.readouterr().out
    assert main(["progress", str(folder / "logs-of-nobody")]) == 1


def test_cost(undisturbed, tmp_path):
    runs = twelve(tmp_path, steps=3600)
    slurm = make_engine("slurm", gpus=2, cpus=4)
    given = cost_of(runs, slurm, 0.5)
    assert str(given) == "12 runs, 43,200 steps to go; 0.5 s per step (given): 12 GPU hours"
    unknown = cost_of(runs, make_engine("ray"))
    assert unknown.seconds is None
    assert "--step-time" in str(unknown)
    measured = cost_of(runs[:1], make_engine("local", jobs=1))
    assert measured.source == "measured here, now"
    assert "core hours, about" in str(measured)
    begun = replace(undisturbed[0], config=replace(undisturbed[0].config, steps=8))
    seen = cost_of([begun], make_engine("ray"))
    assert (seen.steps, seen.source) == (4, "from runs of this sweep")
    for wrong in ("soon", "0", "-1", "nan"):
        with pytest.raises(InvalidConfigError, match="--step-time"):
            parse_step_time(wrong)


# Sweeps


def test_a_sweep_keeps_its_number_of_threads(tmp_path, capsys):
    runs = plan_runs(tiny(2), ["none"], [0], tmp_path)
    printed = PrintedCommands(cpus=3)
    assert not run_all(runs, 2, engine=printed)
    assert shared(tmp_path) == {"threads": 3}
    again = PrintedCommands()
    run_all(runs, 2, engine=again)
    assert "OMP_NUM_THREADS=3" in again.lines[0]
    run_all(runs, 2, engine=PrintedCommands(cpus=1))
    assert "began with 3 thread(s)" in capsys.readouterr().out


def test_what_is_at_work_already_is_waited_for(tmp_path, monkeypatch, undisturbed):
    """A worker of a command that was killed: its unit is not started twice, and is taken over when it ends."""
    runs = plan_runs(tiny(), ["none"], [0], tmp_path)
    unit = unit_of(runs[0], tmp_path)
    unit.write(description(runs[0], tmp_path, 4))
    begun, started = threading.Event(), []

    def other() -> None:
        with unit.at_work("local") as ending:
            begun.set()
            time.sleep(1.0)
            ending.state = "interrupted"

    class Here(LocalEngine):
        """Carries out jobs in this process."""

        def submit(self, jobs):
            started.extend(time.monotonic() for _ in jobs)
            for job in jobs:
                self.over = {job.name: worker.main([str(path) for path in job.units])}
            return {}

        def poll(self):
            found, self.over = getattr(self, "over", {}), {}
            return found

    monkeypatch.setattr(worker, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15))
    monkeypatch.setattr(sweeps, "POLL_SECONDS", 0.05)
    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    before = time.monotonic()
    assert run_all(runs, 4, engine=Here(jobs=2))
    thread.join()
    assert len(started) == 1
    assert started[0] - before > 0.5
    assert result(runs[0]) == result(undisturbed[0])


def test_submitit_killed_and_preempted_then_continued_here(tmp_path, undisturbed, monkeypatch):
    """Two jobs of six runs each, with submitit's local executor. One is killed; the other is preempted, and goes on."""
    pytest.importorskip("submitit")
    runs = twelve(tmp_path)
    monkeypatch.setattr(sweeps, "POLL_SECONDS", 0.05)
    done: dict[str, int] = {}

    def disturb() -> None:
        until = time.monotonic() + 300
        while len(done) < 2 and time.monotonic() < until:
            for unit in units_of(tmp_path):
                state = unit.state
                if not state.alive or state.process in done.values():
                    continue
                if not done:
                    parent = Path(f"/proc/{state.process}/stat").read_text().rpartition(")")[2].split()[1]
                    os.kill(int(parent), signal.SIGUSR2)
                    done["preempted"] = state.process
                else:
                    os.kill(state.process, signal.SIGKILL)
                    done["killed"] = state.process
            time.sleep(0.01)

    thread = threading.Thread(target=disturb)
    thread.start()
    with pytest.raises(RunFailedError, match="was killed or lost"):
        run_all(runs, 4, engine=make_engine("submitit", jobs=2, cpus=1), runs_per_job=6)
    thread.join()
    assert set(done) == {"preempted", "killed"}
    finished = [run for run in runs if run.finished]
    assert 0 < len(finished) < 12
    assert run_all(runs, 4, jobs=1)
    assert [result(run) for run in runs] == [result(run) for run in undisturbed]


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
    """Ray interrupts the main thread, which wakes nobody who waits in a call of the system."""

    def cancel() -> None:
        until = time.monotonic() + 30
        while not (log.exists() and log.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        _thread.interrupt_main()

    log = tmp_path / "logs" / "a.txt"
    thread = threading.Thread(target=cancel)
    # Whoever starts the tests in the background has SIGINT ignored, and Ray's interrupt with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            clusters._task()(["-c", SAVES], {}, str(tmp_path), str(log))
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").read_text() == "all"
    assert clusters._task()(["-c", "raise SystemExit(7)"], {}, str(tmp_path), str(log)) == 7


def test_ray_of_two_nodes_gives_the_same(tmp_path, undisturbed):
    """A cluster of two nodes on this machine. Ray is large, and not among the packages of the tests."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'scalelong[ray]' to run this")
    cluster = pytest.importorskip("ray.cluster_utils").Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        runs = twelve(tmp_path)
        engine = make_engine("ray", address=cluster.address, cpus=1)
        assert run_all(runs, 4, engine=engine, runs_per_job=6)
        assert not ray.is_initialized()
        assert [result(run) for run in runs] == [result(run) for run in undisturbed]
    finally:
        cluster.shutdown()
