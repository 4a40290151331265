"""μP: rates that transfer with the width, for U-ViT, UNets and any other network.

parameters        what each parameter is (input, hidden, output, vector, finite), by comparison with a base
groups            the start and the parameter groups for AdamW
coordinate_check  the check: how far each block moves in a few steps, over widths
"""

from .coordinate_check import (
    Coordinates as Coordinates,
    coordinates as coordinates,
)
from .groups import (
    LR_SCALE as LR_SCALE,
    OUTPUT_STARTS as OUTPUT_STARTS,
    MupStart as MupStart,
    groups_of as groups_of,
    parameter_groups as parameter_groups,
    require_output_start as require_output_start,
    start_ as start_,
    start_kinds_ as start_kinds_,
)
from .parameters import (
    Base as Base,
    Given as Given,
    Kind as Kind,
    Kinds as Kinds,
    bare as bare,
    kinds as kinds,
    layer_sides as layer_sides,
    unet_at as unet_at,
    uvit_at as uvit_at,
    width_of as width_of,
    width_options as width_options,
)
