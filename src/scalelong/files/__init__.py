"""Files: whole or not there, locks, and the cache.

access        reading, and named errors for what the system refuses
links         names below a folder of a stranger, without following links
whole         files and folders that are whole or not there; locks; JSON lines
disk_cache    results of pure functions
"""

from .access import (
    MOST_TEXT as MOST_TEXT,
    NOT_THE_FILE as NOT_THE_FILE,
    digest as digest,
    file_digest as file_digest,
    fitting as fitting,
    in_words as in_words,
    make_folder as make_folder,
    parse_json as parse_json,
    read_bytes as read_bytes,
    read_fields as read_fields,
    read_json as read_json,
    read_text as read_text,
    refusal as refusal,
    require_file_place as require_file_place,
    require_folder_place as require_folder_place,
    require_regular as require_regular,
    writing as writing,
)
from .disk_cache import (
    CACHE_VARIABLE as CACHE_VARIABLE,
    at_home as at_home,
    cache_folder as cache_folder,
    cached_array as cached_array,
    cached_bytes as cached_bytes,
    key_of as key_of,
)
from .links import (
    below as below,
    refuse_link as refuse_link,
    refuse_links_in as refuse_links_in,
    results_folder as results_folder,
    temporary_name as temporary_name,
)
from .whole import (
    allocate as allocate,
    append_json_line as append_json_line,
    exclusive as exclusive,
    forget_lock as forget_lock,
    locked as locked,
    new_folder as new_folder,
    read_json_lines as read_json_lines,
    remove_leftovers as remove_leftovers,
    sync as sync,
    write_bytes as write_bytes,
    write_json_lines as write_json_lines,
    write_text as write_text,
)
