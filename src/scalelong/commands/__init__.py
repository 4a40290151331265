"""One module per command of the command line.

A command is two functions: `parser()`, which makes the parser and imports nothing slow, and `run(options)`, which
imports the work, does it, and returns an exit code (None is 0). So `--help` answers at once. Flags that several
commands share are in `options`.
"""
