"""One HTML page about runs: a verdict, pictures, curves, the long skips. It works offline and loads nothing.

    scalelong report runs/compare-digits-tiny
    write_report(["runs/a", "runs/b"], "report.html")
    watch_report(["runs/a"])                              # the same file, again and again while the run goes on

collect   gathers what the page shows from run folders, as plain data
page      puts template, style, script and data into one file
"""

from ..errors import RunFolderError as RunFolderError
from .collect import collect as collect
from .page import watch_report as watch_report, write_report as write_report
