"""One HTML page about runs: a verdict, pictures, curves, the long skips. It works offline and loads nothing.

    scalelong report runs/compare-digits-tiny
    write_report(["runs/a", "runs/b"], "report.html")
    write_timelapse("runs/a")                             # samples.gif: how the samples form
    serve("runs/a")                                       # the same page, live while the run goes on

collect   gathers what the page shows from run folders, as plain data
page      puts template, style, script and data into one file, and serves it
"""

from ..errors import RunFolderError as RunFolderError
from .collect import collect as collect, find_runs as find_runs
from .page import (
    render as render,
    serve as serve,
    serving as serving,
    write_report as write_report,
    write_timelapse as write_timelapse,
)
