"""The notebooks of docs/notebooks: run again, with what they print and draw kept for the site.

python -m website.notebooks            # all of them, in place
python -m website.notebooks theory     # one
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"

SETTINGS = """
import os, sys, warnings
sys.path[:0] = {path!r}
warnings.simplefilter("error")  # as in the tests
for theirs in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
    warnings.filterwarnings("ignore", category=theirs)
import logging, torch, matplotlib
get_ipython().run_line_magic("matplotlib", "inline")  # figures are shown, whoever made them
logging.getLogger("scalelong").setLevel(logging.ERROR)
torch.set_num_threads(1)
matplotlib.rcParams.update({{"figure.dpi": 70, "savefig.dpi": 70}})
"""
"""Runs before the first cell: small pictures, one thread, warnings that fail."""


def execute(path: Path, folder: Path) -> Any:
    """The notebook, run in a folder of its own. A cell that raises, raises here."""
    notebook: Any = nbformat.read(path, as_version=4)
    written = code(notebook)
    source = str(NOTEBOOKS.parents[1] / "src")
    settings = nbformat.v4.new_code_cell(SETTINGS.format(path=[source]))
    notebook.cells.insert(0, settings)
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place, coalesce_streams=True)
    client.execute(env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    notebook.cells.remove(settings)
    for number, cell in enumerate(written, 1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)  # times of execution: they would change with every run
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    return notebook


def kinds(notebook: Any) -> list[set[str]]:
    """What each cell shows: "text", "image/png", "text/html"."""
    shown = [
        [{"text": ""} if "text" in output else output["data"] for output in cell.outputs] for cell in code(notebook)
    ]
    return [{kind for output in outputs for kind in output} for outputs in shown]


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main(names: list[str]) -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                notebook = execute(path, Path(folder))
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
