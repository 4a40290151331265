"""Files: whole or not there, locks, and the cache.

access        what the system refuses, in words; places that are checked before any work
readers       regular files of a sensible size; JSON, YAML, digests
locks         one process at a time
whole         files and folders that are whole or not there; JSON lines
disk_cache    results of pure functions
"""

from .access import (
    NOT_THE_FILE as NOT_THE_FILE,
    in_words as in_words,
    make_folder as make_folder,
    of_the_system as of_the_system,
    refusal as refusal,
    require_file_place as require_file_place,
    require_folder_place as require_folder_place,
    writing as writing,
)
from .disk_cache import (
    VARIABLE as VARIABLE,
    at_home as at_home,
    cache_folder as cache_folder,
    cached_array as cached_array,
    cached_bytes as cached_bytes,
    key_of as key_of,
    not_kept as not_kept,
    to_be_filled as to_be_filled,
)
from .locks import (
    exclusive as exclusive,
    forget_lock as forget_lock,
    locked as locked,
)
from .readers import (
    MOST_TEXT as MOST_TEXT,
    digest as digest,
    file_digest as file_digest,
    fitting as fitting,
    misfit as misfit,
    parse_json as parse_json,
    read_bytes as read_bytes,
    read_fields as read_fields,
    read_json as read_json,
    read_text as read_text,
    read_yaml as read_yaml,
    require_regular as require_regular,
)
from .whole import (
    MOST_LINE as MOST_LINE,
    append_json_line as append_json_line,
    lines_from_the_end as lines_from_the_end,
    new_folder as new_folder,
    read_json_lines as read_json_lines,
    refuse_line as refuse_line,
    remove_leftovers as remove_leftovers,
    sync as sync,
    write_bytes as write_bytes,
    write_json_lines as write_json_lines,
    write_text as write_text,
)
