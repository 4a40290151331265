"""One HTML page about runs: a verdict, pictures, curves, the long skips. It works offline and loads nothing.

    scalelong report runs/compare-digits-tiny
    write_report(["runs/a", "runs/b"], "report.html")
    serve("runs/a")                                       # the same page, live while the run goes on

collect   gathers what the page shows from run folders, as plain data
page      puts template, style, script and data into one file
serve     gives it out on this machine, and again when a run has written something
"""

from ..errors import NoRunsError as NoRunsError
from .collect import collect as collect, find_runs as find_runs
from .page import render as render, write_report as write_report
from .serve import serve as serve, serving as serving
