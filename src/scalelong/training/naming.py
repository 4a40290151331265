"""A run folder for those who did not name one. The same configuration gives the same folder, so that it continues."""

import hashlib
import json
import re
from pathlib import Path

from .config import TrainConfig
from .config_io import HARMLESS, flatten, to_dict
from .recipes import RECIPES, recipe


def default_folder(config: TrainConfig) -> Path:
    """runs/RECIPE-SCALING-seedN, with a short hash if it differs from the recipe in other things, too."""
    scaling = _slug(config.scaling)
    for name in RECIPES:
        if _essence(config) == _essence(recipe(name), scaling=config.scaling, seed=config.seed):
            return Path("runs") / f"{name}-{scaling}-seed{config.seed}"
    data = _slug(Path(config.data).name or "data")
    digest = hashlib.sha256(_essence(config).encode()).hexdigest()[:6]
    return Path("runs") / f"{data}-{_slug(config.model)}-{scaling}-seed{config.seed}-{digest}"


def _essence(config: TrainConfig, **changes: object) -> str:
    """All that makes the run what it is, as text."""
    values = {name: value for name, value in flatten(to_dict(config)).items() if not name.startswith(HARMLESS)}
    return json.dumps(values | changes, sort_keys=True)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"
