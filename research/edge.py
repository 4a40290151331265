"""The paper's claims where its effect can appear: deep U-ViTs at the edge of stability, in small batches.

    python -m research.edge kappas --data DATA    # which κ the estimators choose here, before any run
    python -m research.edge run --data DATA       # train what is missing, one JSON line per run

DATA is a folder with CIFAR-10 (docs/data.md), for one setting of the question about κ; without it that setting is left
out. All others take the garments that come with the package. The rules were committed before the runs:
docs/evidence/edge/plan.md. Training and fates are those of `research.survival`. Interrupt at any time: the same command
goes on with the runs that are missing.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from research import survival
from research.survival import Arm, Run, Setting
from scalelong.data import load_data, to_float
from scalelong.diffusion import NoiseProcess
from scalelong.experiments.records import rounded
from scalelong.files import write_text
from scalelong.kappa import choose_kappa

FOLDER = Path("docs/evidence/edge")
SEEDS, KAPPA_SEEDS = tuple(range(51_000, 51_008)), tuple(range(51_100, 51_108))
HELD_OUT, JUDGE_EVERY, READ_EVERY = 128, 25, 2
READ = ("encoder.0", "encoder.4", "encoder.8", "middle", "decoder.3", "decoder.7", "decoder.11")
"""The blocks whose outputs are read, of a network of depth 24."""


# Methods and settings

METHODS: dict[str, Arm] = {
    "none": Arm(),
    "1/√2": Arm(attach="uniform"),
    "CS(0.7)": Arm(attach="cs:0.7"),
    "LS": Arm(attach="ls:start=paper"),
    "CS(0.7) reversed": Arm(attach="cs:kappa=0.7,reverse=true"),
    "stable τ = 0.1": Arm(network={"residual_scaling": 0.1}),
    "stable τ = 0.3": Arm(network={"residual_scaling": 0.3}),
    "ReZero": Arm(network={"residual_scaling": "rezero"}),
    "LS, bounded": Arm(attach="ls"),
}
PAPER = ("none", "1/√2", "CS(0.7)", "LS")


def arm_of(method: str) -> Arm:
    """Of the table above, or CS with any κ: "CS(0.63)"."""
    if method in METHODS:
        return METHODS[method]
    kappa = float(method.removeprefix("CS(").removesuffix(")"))
    return Arm() if kappa == 1 else Arm(attach=f"cs:{kappa}")


class Trial(Run):
    """A run with a method of this file."""

    @property
    def spec(self) -> Arm:
        return arm_of(self.arm)


@dataclass(frozen=True)
class Place:
    """A setting at its rate, and the methods that are compared there."""

    setting: Setting
    lr: float
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    read: bool = False
    """Whether features and gradients are read while it trains, for Figure 1."""

    def runs(self, methods: Sequence[str] | None = None) -> list[Trial]:
        return [Trial(self.setting, m, self.lr, s) for m in (methods or self.methods) for s in self.seeds]


GARMENTS = Setting(data="garments", steps=200)
PLACES: dict[str, Place] = {
    "edge": Place(GARMENTS, 1.2e-2, tuple(METHODS), read=True),
    "near": Place(GARMENTS, 8e-3, tuple(METHODS), read=True),
    "batch 2": Place(Setting(data="garments", steps=200, batch=2), 1.2e-2, PAPER),
    "depth 16": Place(Setting(data="garments", steps=200, depth=16), 1.6e-2, PAPER),
    "depth 40": Place(Setting(data="garments", steps=200, depth=40), 8e-3, PAPER),
}
KAPPA_PLACES: dict[str, Place] = {
    "κ, CIFAR-10": Place(Setting(steps=300), 8e-3, (), KAPPA_SEEDS),
    "κ, garments": Place(Setting(data="garments", steps=130), 1.6e-2, (), KAPPA_SEEDS),
}
"""Their methods are what the estimators chose: `kappas.json`."""
ORDER = ("edge", "κ, CIFAR-10", "batch 2", "depth 16", "near", "κ, garments", "depth 40")
"""In which they are run: if time runs out, the last ones are not done, and the page says so."""


def place_of(name: str, folder: Path) -> Place:
    if name in PLACES:
        return PLACES[name]
    place = KAPPA_PLACES[name]
    chosen = json.loads((folder / "kappas.json").read_text(encoding="utf-8"))[place.setting.data]
    return Place(place.setting, place.lr, kappa_methods(chosen), place.seeds)


# κ, as the estimators choose it for these networks

KAPPA_DEFAULT = "CS(0.7)"
ASKED = {
    "A": ("data", "kappa"),
    "A, low end": ("data", "low"),
    "B": ("network", "kappa"),
    "B, low end": ("network", "low"),
    "C": ("pilot", "kappa"),
}
"""By the name on the page: the estimator, and what is taken of its answer."""
NEAREST = 0.02
"""κ that lie nearer to each other than this are one method: eight seeds cannot tell them apart."""


def ask(folder: Path, data: Path | None) -> None:
    """What each estimator answers for the data and the first seed's network of each setting about κ."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for place in KAPPA_PLACES.values():
        setting = place.setting
        if setting.data == "cifar10" and data is None:
            continue
        images = survival.load_images(setting.data, data)
        build = partial(survival.build, Trial(setting, "none", place.lr, place.seeds[0]), images.shape[1])
        pilot = {"steps": 160, "seeds": 1, "learning_rate": place.lr, "batch_size": setting.batch}
        answers = {}
        for method in ("data", "network", "pilot"):
            choice = choose_kappa(build, images, "vp", method, **(pilot if method == "pilot" else {}))
            answers[method] = {"kappa": choice.kappa, "low": choice.low, "reasons": list(choice.reasons)}
            print(f"{setting.data}: {choice}", flush=True)
        found[setting.data] = answers
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "kappas.json", json.dumps(found, ensure_ascii=False, indent=1) + "\n")


def chosen_kappas(answers: dict[str, Any]) -> dict[str, float]:
    """By the name of the choice: κ, with two digits."""
    return {name: round(answers[method][end], 2) for name, (method, end) in ASKED.items()}


def kappa_methods(answers: dict[str, Any]) -> tuple[str, ...]:
    """0.7 and every other κ that was chosen, each once."""
    found = [0.7]
    for kappa in chosen_kappas(answers).values():
        if all(abs(kappa - other) > NEAREST for other in found):
            found.append(kappa)
    return tuple(KAPPA_DEFAULT if kappa == 0.7 else f"CS({kappa:g})" for kappa in found)


def method_for(kappa: float, methods: Sequence[str]) -> str:
    """The method that stands for a κ: itself, or the one that is as near as makes no difference."""
    return min(methods, key=lambda method: abs(float(method[3:-1]) - kappa))


# Looking at runs while they are trained


class Reader(survival.Observer):
    """Held-out losses every 25 steps; where asked for, sizes of features and of the gradient every two."""

    def __init__(self, place: Place, images: Tensor, held_out: Tensor) -> None:
        self.place = place
        self.shells: dict[str, nn.Module] = {}
        self.curves: dict[Any, list[list[float | None]]] = defaultdict(list)
        self.series: dict[Any, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
        process = NoiseProcess()
        # The same noisy images for all runs.
        self.probe, self.probe_times, _ = next(survival.batches(images, 7, process))
        self.t = process.times((torch.arange(len(held_out)) + 0.5) / len(held_out))
        self.noise = torch.randn(held_out.shape, generator=torch.Generator().manual_seed(11))
        self.x = process.add_noise(held_out, self.noise, self.t)

    def wants(self, run: Run, step: int) -> bool:  # noqa: ARG002
        return (step > 0 and step % JUDGE_EVERY == 0) or (self.place.read and step % READ_EVERY == 0)

    def before(self, run: Run, step: int, state: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        if step > 0 and step % JUDGE_EVERY == 0:
            self.judge(run, step, state)
        if self.place.read and step % READ_EVERY == 0:
            series = self.series[run.key]
            squares = torch.stack([gradient.square().sum() for gradient in gradients.values()])
            series["gradient"].append(short(float(squares.sum().sqrt())))
            for name, value in self.sizes(run, state).items():
                series[name].append(short(value))

    def end(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:
        curve = self.curves[run.key]
        self.judge(run, self.place.setting.steps, state)
        series = self.series.pop(run.key, {})
        return {"held_out": curve, **({"series": series} if series else {})}

    @torch.no_grad()
    def judge(self, run: Run, step: int, state: dict[str, Tensor]) -> None:
        predicted = functional_call(self.shell(run), state, (self.x, self.t))
        self.curves[run.key].append([step, short(float((predicted - self.noise).square().mean()))])

    @torch.no_grad()
    def sizes(self, run: Run, state: dict[str, Tensor]) -> dict[str, float]:
        """RMS behind some blocks, on the probe batch."""
        shell, found = self.shell(run), {}

        def hook(name: str) -> Callable[..., None]:
            def keep(_: nn.Module, __: Any, output: Tensor) -> None:
                found[name] = float(output.square().mean().sqrt())

            return keep

        handles = [shell.get_submodule(name).register_forward_hook(hook(name)) for name in READ]
        functional_call(shell, state, (self.probe, self.probe_times))
        for handle in handles:
            handle.remove()
        return found

    def shell(self, run: Run) -> nn.Module:
        if run.arm not in self.shells:
            self.shells[run.arm] = survival.build(run, self.x.shape[1])
        return self.shells[run.arm]


def short(value: float) -> float | None:
    return rounded(value) if math.isfinite(value) else None


def held_out_images(name: str, data: Path | None) -> Tensor:
    """Images that no run is trained on: the last garments, or photographs behind those that are trained on."""
    if name == "garments":
        whole = load_data("garments")
        return to_float(whole.fetch(range(len(whole) - HELD_OUT, len(whole))).images)
    whole = load_data(str(data))
    images = to_float(whole.fetch(range(4000, 4000 + HELD_OUT)).images)
    return torch.nn.functional.avg_pool2d(images, 2)


def run(name: str, folder: Path, data: Path | None) -> None:
    """Train what is missing of a setting, a method after the other, all seeds of a method side by side."""
    place, path = place_of(name, folder), folder / f"{file_name(name)}.jsonl"
    if place.setting.data == "cifar10" and data is None:
        print(f"{name}: left out, because it needs CIFAR-10; give --data FOLDER", flush=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    finished = {survival.key_of(record) for record in survival.read(path)}
    missing = [run for run in place.runs() if run.key not in finished]
    print(f"{name}: {len(missing)} of {len(place.runs())} runs are missing", flush=True)
    if not missing:
        return
    images, held_out = survival.load_images(place.setting.data, data), held_out_images(place.setting.data, data)
    for method in place.methods:
        waiting = [run for run in missing if run.arm == method]
        if waiting:
            survival.train(waiting, images, partial(keep, path), Reader(place, images, held_out))


def keep(path: Path, run: Run, result: dict[str, Any]) -> None:
    if result["collapsed"] is not None:
        result["held_out"].pop()  # it did not come to the last step
    survival.append(path, run, result)
    fate = "survived" if result["survived"] else f"collapsed at {result['collapsed']}"
    print(f"{run.arm}, {run.lr:g}, seed {run.seed}: {fate}, best {result['best']}", flush=True)


def file_name(name: str) -> str:
    return name.replace("κ, ", "kappa-").replace(" ", "").lower()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.edge", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("kappas", help="ask the estimators of κ")
    running = commands.add_parser("run", help="train what is missing")
    running.add_argument("places", nargs="*", help=f"by default all: {', '.join(ORDER)}")
    for command in (asking, running):
        command.add_argument("--data", type=Path, help="a folder with CIFAR-10")
    for command in (asking, running):
        command.add_argument("--folder", type=Path, default=FOLDER, help="of the results (default: %(default)s)")
    options = parser.parse_args()
    if options.command == "kappas":
        ask(options.folder, options.data)
    elif options.command == "run":
        if unknown := sorted(set(options.places) - set(ORDER)):
            parser.error(f"no setting {', '.join(unknown)}; known: {', '.join(ORDER)}")
        for name in options.places or ORDER:
            run(name, options.folder, options.data)


if __name__ == "__main__":
    main()
