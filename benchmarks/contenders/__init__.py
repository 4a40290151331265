"""Factories of steps: `make(...)` returns a function that does one step. They run in a worker's process.

plain     a U-ViT of stock modules, and its races against ours in one process
ours      steps of our trainer, its parts, two processes, networks that are scaled from outside
switched  several contenders in one process, in lockstep
sweep     runs of a range, one by one and together
theirs    the authors' code, and diffusers' example script

The names below say where each factory is. The modules are imported in the workers' processes alone.
"""

_HERE = __name__

TRAINER = f"{_HERE}.ours:training_step"
INFERENCE = f"{_HERE}.ours:inference_step"
MATMUL = f"{_HERE}.ours:matmul"
WATCHED = f"{_HERE}.ours:watched_step"
MONITORED = f"{_HERE}.ours:monitored_step"
PAIR = f"{_HERE}.ours:Pair"
TRAINING_ON = f"{_HERE}.ours:training_step_on"
PLANNING = f"{_HERE}.ours:Planning"
SWITCHED_TRAINING = f"{_HERE}.switched:training"
SWITCHED_INFERENCE = f"{_HERE}.switched:inference"
SWITCHED_ATTACHED = f"{_HERE}.switched:attached"
SWITCHED_MONITOR = f"{_HERE}.switched:monitored"
PLAIN_RACES = f"{_HERE}.plain:PlainRaces"
SWEEP_RACES = f"{_HERE}.sweep:SweepRaces"
ALONE, TOGETHER = "one by one", "together"
"""What the two sides of a race between sweeps are called."""
OFFICIAL = f"{_HERE}.theirs:OfficialStep"
OFFICIAL_CHECK = f"{_HERE}.theirs:SameFunction"
UNET_IMPORTS = ("accelerate", "diffusers.models.unets.unet_2d", "diffusers.training_utils")
"""What both sides of a race between UNets have loaded."""
DIFFUSERS = f"{_HERE}.theirs:ScriptStep"
