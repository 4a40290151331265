"""Speed and memory, measured as ratios against what a user would run instead: `scalelong bench`.

catalogue   the command, and all benchmarks by name
cases/      what is measured: each case names its contenders
contenders/ factories that make a function for one step
contender   contenders take turns, each in a process of its own (`worker`): a busy moment falls on all of them
lockstep    where the difference is a percent or less, contenders share a process and go slice by slice
profile     arithmetic, live tensors, operations and time of a step
record      tables, the file of results, the machine, pages filled from results
settings    how a measurement is made, and the networks
"""
