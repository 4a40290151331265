"""The report of a folder, live: a page on this machine alone that loads itself again when a run has written more.

Only the page and a mark of its state are given out. No file of the folder can be asked for, and nothing in it is run.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from pathlib import Path
from threading import Event, Thread

from ..config import ALARMS, METRICS, ROLLBACKS, SCORES
from ..errors import InvalidConfigError, NoRunsError, ScaleLongError
from ..files import digest
from .collect import collect
from .page import render

logger = logging.getLogger(__name__)

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
        raise NoRunsError(f"there is no folder {root}; give a run folder or a folder that holds runs")
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
    found = [path for name in WATCHED for path in folder.glob(f"**/{name}")] + list(folder.glob("**/samples"))
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
