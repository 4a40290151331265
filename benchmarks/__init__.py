"""Speed on this machine, as ratios against what a user would run instead: `scalelong lab bench`.

catalogue   the command
cases       what is measured: each case makes a race between steps
harness     contenders take turns in one process; ratios with their spread, tables, the file of results
quality     time until the final loss of others
theirs      the authors' code from a checkout of it, and the step of diffusers' example script
"""
