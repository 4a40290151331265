"""The paper's figures and tables again, by command: `scalelong reproduce`."""

from .items import ITEMS
from .run import describe, redraw, reproduce

__all__ = ["ITEMS", "describe", "redraw", "reproduce"]
