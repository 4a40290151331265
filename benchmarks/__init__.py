"""Speed and memory, measured as ratios against what a user would run instead: `scalelong bench`.

A case (`cases/`) names its contenders; a contender (`contenders/`) is a factory that makes a function for one step.
Each lives in a process of its own (`worker`), and they take turns (`turns`), so that a busy moment of the machine falls
on all of them. Where the difference is a percent or less they share a process, and go slice by slice (`lockstep`). What
comes out are tables (`tables`) and a JSON file (`record`).
"""
