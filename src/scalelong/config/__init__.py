"""Everything that defines a run, as plain data. Importing this package does not import torch.

names     schedules, samplers, optimisers, lengths of averages
train     the dataclasses of a run; each field says what it is and what it affects
fields    from dictionaries and YAML to a configuration and back; what changed between two
recipes   runs by name, and the default name of a run folder
layout    file names of a run folder, titles of scores
"""

from .defaults import (
    EARLIER as EARLIER,
    NEW_NARROW as NEW_NARROW,
    NEW_RUN as NEW_RUN,
    NEW_UVIT as NEW_UVIT,
    new_uvit_options as new_uvit_options,
)
from .fields import (
    config_fields as config_fields,
    conflicting_changes as conflicting_changes,
    differences as differences,
    dump_config as dump_config,
    field_paths as field_paths,
    flatten as flatten,
    from_dict as from_dict,
    load_config as load_config,
    result_values as result_values,
    to_dict as to_dict,
    with_values as with_values,
)
from .layout import (
    ALARMS as ALARMS,
    ANCHOR_TITLES as ANCHOR_TITLES,
    AVERAGES as AVERAGES,
    CHECKPOINTS as CHECKPOINTS,
    CONFIG as CONFIG,
    DATA as DATA,
    DIVERGED as DIVERGED,
    ENVIRONMENT as ENVIRONMENT,
    IMAGES as IMAGES,
    METRICS as METRICS,
    MLFLOW_ID as MLFLOW_ID,
    README as README,
    ROLLBACKS as ROLLBACKS,
    RUN as RUN,
    SAMPLES as SAMPLES,
    SCORE_TITLES as SCORE_TITLES,
    SCORES as SCORES,
    TENSORBOARD as TENSORBOARD,
    TRACKER_ID as TRACKER_ID,
    VARIANT as VARIANT,
)
from .names import (
    ADAMS as ADAMS,
    FLOWS as FLOWS,
    OUTPUT_STARTS as OUTPUT_STARTS,
    SAMPLERS as SAMPLERS,
    SCHEDULE as SCHEDULE,
    SCHEDULES as SCHEDULES,
    STEPS as STEPS,
    AverageLength as AverageLength,
    Condition as Condition,
    Decay as Decay,
    KeepBest as KeepBest,
    OnCollapse as OnCollapse,
    OnNaN as OnNaN,
    Optimizer as Optimizer,
    OutputStart as OutputStart,
    Precision as Precision,
    Prediction as Prediction,
    Schedule as Schedule,
    Weighting as Weighting,
    is_snapshot as is_snapshot,
    power as power,
    relative_length as relative_length,
    require_output_start as require_output_start,
    require_prediction as require_prediction,
    require_sampler as require_sampler,
    require_schedule as require_schedule,
    samplers_of as samplers_of,
    seconds_of as seconds_of,
)
from .recipes import (
    RECIPES as RECIPES,
    default_folder as default_folder,
    recipe as recipe,
)
from .train import (
    GIBIBYTE as GIBIBYTE,
    CheckpointConfig as CheckpointConfig,
    DiffusionConfig as DiffusionConfig,
    GuardConfig as GuardConfig,
    HardwareConfig as HardwareConfig,
    ImagesConfig as ImagesConfig,
    LoggingConfig as LoggingConfig,
    OptimizerConfig as OptimizerConfig,
    TextConfig as TextConfig,
    TrainConfig as TrainConfig,
    require as require,
)
