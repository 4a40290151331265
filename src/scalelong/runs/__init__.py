"""What a run is: below evaluation, which scores runs, and training, which makes them.

model        from a configuration to its network, its data and its conditions
checkpoint   the state of a run on disk: whole or not there
folder       the run folder: configuration, data, metrics, environment
adapters     LoRA
averages     moving averages of several lengths, and of any length after training
origin       weights that exist already, as the start of a run
load         a trained run, back from its folder
samples      folders of generated images
shipped      small trained networks that come with the package
processes    devices and processes, through accelerate
"""

from ..diffusion.images import image_grid
from ..errors import CheckpointError, RunFolderError, RunLockedError, SampleFolderError
from .checkpoint import Snapshot, read_checkpoint, saved_steps, write_checkpoint
from .folder import RunFolder, read_metrics
from .load import Run, load_run
from .model import DataShape, RunData, build_model, load_images, load_run_data, make_conditions, shape_of
from .origin import adopt_weights, load_start_, read_origin
from .samples import SampleFolder, fill_folder, folder_name, save_png
from .shipped import NETWORKS, load_trained, shipped_names, unpack
