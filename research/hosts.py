"""Training across two hosts, one of which is killed: two network namespaces of this machine, each with its own address.

    sudo python -m research.hosts out/

Namespaces share disk, memory and processors, and have nothing else of the network in common than one cable (a veth
pair): 10.77.0.1 and 10.77.0.2. On each, torchrun starts one process of the same `scalelong train`, and they meet by the
c10d rendezvous at the first host. To make namespaces and the cable needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN); what
runs inside does not. Everything is removed at the end.

Legs, each against a run that nobody disturbed:

- killed: all processes of the second host are killed in the middle. Its torchrun is started again.
- cut: the cable is cut in the middle, as when a host loses power: nobody says goodbye. The second host's processes are
  killed, the cable is mended, its torchrun is started again.
- elastic: with --nnodes 1:2 the second host is killed and does not come back; the first goes on alone.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalelong.console import show_table
from scalelong.errors import RunFailedError
from scalelong.experiments.records import last_line

HOSTS = {"sl-one": "10.77.0.1", "sl-two": "10.77.0.2"}
ONE, TWO = HOSTS
PORT = 29477
STEPS, SAVE_EVERY, KILL_AFTER = 240, 20, 50
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "cable",  # the device that leads to the other host; NCCL_SOCKET_IFNAME for GPUs
    # A host that comes back asks for the address of the first process, which torchrun tells in the first round alone,
    # unless each round makes its store anew.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
LEGS = ("killed", "cut", "elastic")
PATIENCE = 1500.0
RECIPE = [
    *("--recipe", "digits-tiny", "--scaling", "cs:0.7", "--steps", str(STEPS), "--batch-size", "16"),
    *("--model-options", "patch_size=4", "dim=16", "depth=4", "heads=2"),
    *("--held-out", "32", "--held-out-every", str(STEPS), "--samples-every", "0", "--log-every", "5"),
    *("--save-every", str(SAVE_EVERY), "--keep-last", "1", "--trackers"),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.hosts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the runs; the undisturbed one is kept and used again")
    parser.add_argument("--legs", nargs="+", choices=LEGS, default=list(LEGS))
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("two network namespaces need root: give the command again with sudo", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed
    with two_hosts():
        reference = options.out / "undisturbed"
        if not finished(reference):
            shutil.rmtree(reference, ignore_errors=True)
            wait([start(host, reference, "2") for host in HOSTS], reference)
        rows = [{"leg": "undisturbed", "stopped at step": "-", "went on with": "-", "restarts": "-", "weights": "-"}]
        for name in options.legs:
            out = options.out / name
            shutil.rmtree(out, ignore_errors=True)
            rows.append({"leg": name, **leg(name, out), "weights": difference(reference, out)})
    print()
    show_table(rows, left=True)
    return 0


def leg(name: str, out: Path) -> dict[str, str]:
    print(f"\n{name}", flush=True)
    nodes = "1:2" if name == "elastic" else "2"
    one, two = (start(host, out, nodes) for host in HOSTS)
    step = wait_for_step(out, KILL_AFTER, [one, two])
    if name == "cut":
        ip("-n", TWO, "link", "set", "cable", "down")
    kill_processes(TWO)  # all of them: torchrun gives its workers sessions of their own
    two.wait()
    print(f"{TWO} is gone after step {step}", flush=True)
    again = []
    if name != "elastic":
        time.sleep(3.0)
        if name == "cut":
            ip("-n", TWO, "link", "set", "cable", "up")
        again = [start(TWO, out, nodes)]
    wait([one, *again], out)
    log = (out.parent / f"{out.name}-{ONE}.txt").read_text(errors="replace")
    resumed = [line.partition("continuing after step ")[2].strip() for line in log.splitlines() if "continuing" in line]
    return {
        "stopped at step": str(step),
        "went on with": f"{'1 host' if name == 'elastic' else '2 hosts'} after step {', '.join(resumed) or '?'}",
        "restarts": str(len(resumed)),
    }


# Hosts


@contextmanager
def two_hosts() -> Iterator[None]:
    remove_hosts()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "cable", "netns", ONE, "type", "veth", "peer", "name", "cable", "netns", TWO)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        remove_hosts()


def remove_hosts() -> None:
    """Processes inside first: a namespace lives as long as they do."""
    for host in HOSTS:
        kill_processes(host)
        subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def kill_processes(host: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailedError(
            f"`ip {' '.join(words)}` failed: {done.stderr.strip()}; does this machine allow namespaces?"
        )


def start(host: str, out: Path, nodes: str) -> "subprocess.Popen[bytes]":
    """torchrun on a host. All hosts are given the same command, but for their own address."""
    words = [
        *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={nodes}", "--nproc_per_node=1", "--max_restarts=5"),
        *("--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS[ONE]}:{PORT}", f"--rdzv_id={out.name}"),
        # Who holds the store? torchrun asks whether the endpoint is its own host name, which all namespaces share.
        *(f"--rdzv_conf=is_host={host == ONE},join_timeout=900,last_call_timeout=5", f"--local_addr={HOSTS[host]}"),
        *("-m", "scalelong", "train", *RECIPE, "--out", str(out)),
    ]
    with open(out.parent / f"{out.name}-{host}.txt", "ab") as log:
        return subprocess.Popen(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **VARIABLES},
        )


def wait_for_step(out: Path, step: int, processes: "list[subprocess.Popen[bytes]]") -> int:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        line = last_line(out, "loss")
        if line is not None and line["step"] >= step:
            return int(line["step"])
        for process in processes:
            if process.poll() is not None:
                raise RunFailedError(
                    f"torchrun ended with code {process.returncode}, see {out.parent}/{out.name}-*.txt"
                )
        time.sleep(0.05)
    raise RunFailedError(f"{out} did not come to step {step} in {PATIENCE:.0f} s")


def wait(processes: "list[subprocess.Popen[bytes]]", out: Path) -> None:
    until = time.monotonic() + PATIENCE
    for process in processes:
        code = process.wait(timeout=max(1.0, until - time.monotonic()))
        if code != 0:
            raise RunFailedError(f"torchrun ended with code {code}, see {out.parent}/{out.name}-*.txt")


# Results


def finished(out: Path) -> bool:
    return (out / "checkpoints" / f"step-{STEPS:08d}").is_dir()


def difference(reference: Path, out: Path) -> str:
    """Of the weights, raw and averaged, at the end."""
    from safetensors.torch import load_file

    equal, largest = True, 0.0
    for name in ("model.safetensors", "ema.safetensors"):
        one, two = (folder / "checkpoints" / f"step-{STEPS:08d}" / name for folder in (reference, out))
        equal &= hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(two.read_bytes()).digest()
        first, second = load_file(one), load_file(two)
        for key, value in first.items():
            if value.is_floating_point():
                largest = max(largest, float((value - second[key]).abs().max()))
    return "byte-identical" if equal else f"differ by at most {largest:.1e}"


if __name__ == "__main__":
    sys.exit(main())
