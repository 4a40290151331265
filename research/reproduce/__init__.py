"""The paper's figures and tables again, by command: `scalelong lab reproduce`.

settings  data, networks, methods, and the runs that they need
claims    a number per seed, where the paper says that it lies, and the rule that judges
figures   curves, dots, traces
fig3      Figure 3: the input of the network, and extra noise on it
fig7      Figure 7: what LS learns
items     all figures and tables, one entry each: arms, quantities, claims, figures
run       train what is missing, measure, write results and pages
command   the flags
"""
