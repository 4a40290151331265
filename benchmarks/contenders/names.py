"""Where the factories are. They are imported in the workers' processes alone."""

_HERE = __package__

TRAINER = f"{_HERE}.trainer:training_step"
INFERENCE = f"{_HERE}.trainer:inference_step"
MATMUL = f"{_HERE}.trainer:matmul"
WATCHED = f"{_HERE}.parts:watched_step"
MONITORED = f"{_HERE}.parts:monitored_step"
PAIR = f"{_HERE}.pair:Pair"
TRAINING_ON = f"{_HERE}.data:training_step"
PLANNING = f"{_HERE}.attach:Planning"
SWITCHED_TRAINING = f"{_HERE}.switched:training"
SWITCHED_INFERENCE = f"{_HERE}.switched:inference"
SWITCHED_ATTACHED = f"{_HERE}.switched:attached"
SWITCHED_MONITOR = f"{_HERE}.switched:monitored"
OFFICIAL = f"{_HERE}.official:OfficialStep"
OFFICIAL_CHECK = f"{_HERE}.official:SameFunction"
UNET_IMPORTS = ("accelerate", "diffusers.models.unets.unet_2d", "diffusers.training_utils")
"""What both sides of a race between UNets have loaded."""
DIFFUSERS = f"{_HERE}.diffusers_script:ScriptStep"
