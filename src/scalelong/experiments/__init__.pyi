from .comparison import (
    COMMAND as COMMAND,
    best_rate_rows as best_rate_rows,
    compare as compare,
    sweep as sweep,
)
from .demo import (
    demo_config as demo_config,
    run_demo as run_demo,
)
from .engines import ENGINES as ENGINES, Engine as Engine, LocalEngine as LocalEngine, make_engine as make_engine
from .plan import (
    PlannedRun as PlannedRun,
    Variant as Variant,
    as_variant as as_variant,
    diagnose_config as diagnose_config,
    diagnose_run as diagnose_run,
    plan_runs as plan_runs,
    recorded_values as recorded_values,
    write_diagnosis as write_diagnosis,
)
from .rates import RecipeTask as RecipeTask, config_range as config_range
from .records import (
    BASELINE as BASELINE,
    DIAGNOSIS as DIAGNOSIS,
    Curve as Curve,
    RunRecord as RunRecord,
    own_file as own_file,
    read_curves as read_curves,
    read_own_json as read_own_json,
    read_own_lines as read_own_lines,
    read_run as read_run,
    steps_ratio as steps_ratio,
    steps_to as steps_to,
)
from .results import (
    Results as Results,
    fisher_p as fisher_p,
    interval as interval,
    ratio_text as ratio_text,
    spread as spread,
    table_rows as table_rows,
    verdict as verdict,
)
from .sweeps import (
    run_all as run_all,
    status_text as status_text,
)
from .tuning import tune_run as tune_run
