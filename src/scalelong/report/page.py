"""The HTML file: template, style, script and data in one, without any reference to the outside. It can be served live.

The server is for this machine alone. It gives out the page and a mark of its state, which tells the page to load itself
again. No file of the folder can be asked for, and nothing in it is run.
"""

import io
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from os import PathLike
from pathlib import Path
from threading import Event, Thread

from .._version import __version__
from ..config import ALARMS, METRICS, ROLLBACKS, SAMPLES, SCORES
from ..errors import InvalidConfigError, RunFolderError, ScaleLongError
from ..files import below, digest, write_bytes, write_text
from ..optional import needs
from .collect import collect, sample_grids

logger = logging.getLogger(__name__)


def write_report(folders: Sequence[str | PathLike[str]], out: str | PathLike[str] | None = None) -> Path:
    """Write the report of these runs, atomically; without `out` as report.html in the first folder. Its path."""
    page = render(collect(folders))
    if out is None:  # in a folder that may be a stranger's: a link of this name is replaced, not followed
        below(folders[0]).write_text("report.html", page)
        return Path(folders[0]) / "report.html"
    if Path(out).is_dir():
        raise RunFolderError(f"the report cannot be written to {out}, which is a folder: give a file, such as r.html")
    write_text(out, page)
    return Path(out)


TALLEST, FRAME, LAST = 512, 600, 3000
"""The least pixels of a frame's longer side, and milliseconds of a frame and of the last one."""


def write_timelapse(folder: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path | None:
    """The sample grids of a run in the order of their steps, as one GIF; None if there are fewer than two.

    Without `out` it is samples.gif in the folder.
    """
    images = needs("PIL.Image", "report", "a time-lapse of samples")
    frames = []
    for _, content in sample_grids(Path(folder)):
        with images.open(io.BytesIO(content), formats=("PNG",)) as image:
            larger = max(1, round(TALLEST / max(image.size)))
            size = (image.width * larger, image.height * larger)
            frames.append(image.convert("RGB").resize(size, images.Resampling.NEAREST))
    if len(frames) < 2:
        return None
    made = io.BytesIO()
    times = [FRAME] * (len(frames) - 1) + [LAST]
    frames[0].save(made, format="GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
    if out is None:
        below(folder).write_bytes("samples.gif", made.getvalue())
        return Path(folder) / "samples.gif"
    write_bytes(out, made.getvalue())
    return Path(out)


def render(data: dict[str, object]) -> str:
    # Inside a script element only "</" could end it, and "<!--" could begin a comment.
    text = json.dumps({**data, "version": __version__}, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = _asset("page.html")
    for mark, content in (("/*STYLE*/", _asset("style.css")), ("/*SCRIPT*/", _script()), ("/*DATA*/", text)):
        page = page.replace(mark, content)
    return page


def _script() -> str:
    return "\n".join(_asset(name) for name in ("chart.js", "glossary.js", "skips.js", "range.js", "app.js"))


def _asset(name: str) -> str:
    return (files("scalelong.report") / "assets" / name).read_text(encoding="utf-8")


# Live

WATCHED = (METRICS, ALARMS, ROLLBACKS, SCORES, "range.json", "diverged.json", "stopped.json")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
"""What the page may do: run its own script, show its own pictures, ask this server."""


def serve(folder: str | PathLike[str], port: int = 8765) -> None:
    """Serve the report of a folder on http://127.0.0.1:PORT until Ctrl-C. Port 0 takes a free one."""
    with serving(folder, port) as address:
        print(f"live report: {address} (Ctrl-C ends it)", flush=True)
        try:
            Event().wait()
        except KeyboardInterrupt:
            return


@contextmanager
def serving(folder: str | PathLike[str], port: int = 0) -> Iterator[str]:
    """The server in a thread of its own; its address."""
    root = Path(folder)
    if not root.is_dir():
        raise RunFolderError(f"there is no folder {root}; give a run folder or a folder that holds runs")
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(root))
    except OSError as error:
        raise InvalidConfigError(f"`port` {port} cannot be used ({error.strerror}): choose a different one") from error
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def state_of(folder: Path) -> str:
    """A mark that changes when a run below the folder has written something that the report shows."""
    found = [path for name in WATCHED for path in folder.glob(f"**/{name}")] + list(folder.glob(f"**/{SAMPLES}"))
    seen = []
    for path in sorted(found):
        try:
            status = path.lstat()
        except OSError:  # replaced at this moment
            continue
        seen.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return digest("\n".join(seen).encode())[:16]


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of a stranger whose name leads here must not read the report.
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):
                self._answer(403, "this page is for this machine alone", "text/plain")
            elif self.path == "/state":
                self._answer(200, state_of(folder), "text/plain")
            elif self.path.partition("?")[0] == "/":
                self._answer(200, _page(folder), "text/html")
            else:
                self._answer(404, "there is one page here: /", "text/plain")

        def _answer(self, code: int, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(code)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", POLICY),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            logger.debug(format, *args)

    return Handler


def _page(folder: Path) -> str:
    state = state_of(folder)  # before the files are read: what is written meanwhile is seen at the next look
    try:
        data = collect([folder], may_be_empty=True)
    except ScaleLongError as error:  # a file that is written at this moment
        data = collect([], may_be_empty=True) | {"verdict": [{"title": "", "text": [str(error)]}]}
    if not data["runs"] and not data["verdict"]:
        data["verdict"] = [{"title": "", "text": ["No run has begun in this folder yet."]}]
    return render({**data, "live": state})
