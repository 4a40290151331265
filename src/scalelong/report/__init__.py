"""Show it: one HTML file that holds runs, curves, samples and the long skips, and works offline."""

from .collect import NoRunsError, collect
from .page import write_report

__all__ = ["NoRunsError", "collect", "write_report"]
