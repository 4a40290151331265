"""Where the factories are. They are imported in the workers' processes alone."""

_HERE = __package__

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
OFFICIAL = f"{_HERE}.theirs:OfficialStep"
OFFICIAL_CHECK = f"{_HERE}.theirs:SameFunction"
UNET_IMPORTS = ("accelerate", "diffusers.models.unets.unet_2d", "diffusers.training_utils")
"""What both sides of a race between UNets have loaded."""
DIFFUSERS = f"{_HERE}.theirs:ScriptStep"
