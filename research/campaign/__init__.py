"""The campaign: kill, starve and deceive every command, and count what held.

    python -m research.campaign --trials 3000 --seed 1
    python -m research.campaign --trial faults:17 --seed 1      # one trial again, with all that it prints
    python -m research.campaign --trials 40 --fresh             # each command in a new Python instead of a fork

forks        one command in a fork, or in a new process: faults, limits, and what its ending says
faults.c     faults of the disk below Python, where there is a C compiler
world        the small world of a trial: data sets of every kind, runs, a comparison, a range, exports, caches
mutations    damage: bytes, values, tables, headers, names, words, variables
trials       the kinds of trials, and the table
"""
