"""From the folders of a comparison to one small file: the held-out curves, and in what the runs differ."""

import re
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidConfigError
from scalelong.experiments.compare import COMMANDS
from scalelong.experiments.results import Curve, read_curves
from scalelong.experiments.runs import DIVERGED
from scalelong.runs.config import flatten, load_config, to_dict

DIGITS = 5
LEFT_OUT = ("seed", "logging.", "checkpoints.", "guard.", "hardware.", "text.", "steps")


def gather(folder: Path, title: str, command: str | None = None) -> dict[str, Any]:
    """The held-out curves of all runs in a folder, and in what their configurations differ."""
    paths = sorted(path.parent for path in folder.glob("*-seed*/config.yaml"))
    if not paths:
        raise InvalidConfigError(f"there are no runs in {folder}: looked for NAME-seedN/config.yaml")
    if command is None:
        if not (folder / COMMANDS).exists():
            raise InvalidConfigError(f"{folder / COMMANDS} is missing: say with --command what made these runs")
        command = (folder / COMMANDS).read_text(encoding="utf-8").strip()
    configs = [flatten(to_dict(load_config(path / "config.yaml"))) for path in paths]
    names = [name for name in {**{n: 0 for c in configs for n in c}} if not name.startswith(LEFT_OUT)]
    apart = [name for name in names if len({repr(config.get(name)) for config in configs}) > 1]
    common = {name: configs[0][name] for name in names if name not in apart and name in configs[0]}
    runs = [
        _gathered(path, {name: config[name] for name in apart if name in config}, config["seed"])
        for path, config in zip(paths, configs, strict=True)
    ]
    return {"title": title, "command": command, "common": common, "runs": runs}


def _gathered(path: Path, differs: dict[str, Any], seed: int) -> dict[str, Any]:
    curves = read_curves(path)
    curve = curves.get("held_out_loss", Curve((), ()))
    scores = {"frechet": _rounded(curves["frechet"])} if "frechet" in curves else {}
    return {
        "name": re.sub(r"-seed\d+$", "", path.name),
        "seed": seed,
        "differs": differs,
        "diverged": (path / DIVERGED).exists(),
        "steps": list(curve.steps),
        "held_out_loss": _rounded(curve),
        **scores,
    }


def _rounded(curve: Curve) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in curve.values]
