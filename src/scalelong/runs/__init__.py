"""Runs, below evaluation, which scores them, and training, which makes them.

model        from a configuration to its network, its data and its conditions
checkpoint   the state of a run on disk: whole or not there
folder       the run folder: configuration, data, metrics, environment
averages     moving averages of several lengths, and of any length after training
origin       weights that exist already, as the start of a run
load         a trained run, back from its folder or from the package
samples      folders of generated images
processes    devices and processes, through accelerate
"""

from .averages import (
    OLDEST as OLDEST,
    forget_snapshots_after as forget_snapshots_after,
    shares as shares,
    write_snapshot as write_snapshot,
)
from .checkpoint import (
    Snapshot as Snapshot,
    abandon_after as abandon_after,
    newest_good as newest_good,
    point_best as point_best,
    prune as prune,
    read_checkpoint as read_checkpoint,
    saved_steps as saved_steps,
    step_folder as step_folder,
    step_of as step_of,
    write_checkpoint as write_checkpoint,
)
from .folder import (
    COMMAND_VARIABLE as COMMAND_VARIABLE,
    RunFolder as RunFolder,
    fingerprints as fingerprints,
    read_metrics as read_metrics,
    require_same_data as require_same_data,
    require_whole_curve as require_whole_curve,
    this_command as this_command,
    with_absolute_data as with_absolute_data,
)
from .load import (
    CARD as CARD,
    NETWORKS as NETWORKS,
    SCORES as SCORES,
    WEIGHTS as WEIGHTS,
    Run as Run,
    load_run as load_run,
    load_trained as load_trained,
    packed_folder as packed_folder,
    require_constant as require_constant,
    unpack as unpack,
)
from .model import (
    DataShape as DataShape,
    RunData as RunData,
    build_model as build_model,
    example_forward as example_forward,
    factory_of as factory_of,
    is_uvit as is_uvit,
    load_images as load_images,
    load_run_data as load_run_data,
    mup_kinds as mup_kinds,
    require_trust as require_trust,
    shape_of as shape_of,
    uses_channels_last as uses_channels_last,
    uvit_arguments as uvit_arguments,
    with_width as with_width,
)
from .origin import (
    adopt_weights as adopt_weights,
    load_start_ as load_start_,
    read_origin as read_origin,
)
from .processes import (
    average as average,
    check_batch_size as check_batch_size,
    describe_processes as describe_processes,
    full_tensor as full_tensor,
    gather_objects as gather_objects,
    in_any_process as in_any_process,
    make_accelerator as make_accelerator,
    on_main as on_main,
    process_state as process_state,
    require_device as require_device,
)
from .samples import (
    NOTE as NOTE,
    SampleFolder as SampleFolder,
    fill_folder as fill_folder,
    folder_name as folder_name,
    read_png as read_png,
    save_png as save_png,
    stack_images as stack_images,
)
