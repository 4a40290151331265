"""Factories of steps: `make(...)` returns a function that does one step. They run in a worker's process."""
