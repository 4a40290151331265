"""Studies that are not part of the library. Each is one room, run by `python -m research.NAME`."""
