"""Files: whole or not there, locks, and the cache.

access        named errors for what the system refuses; places that are checked before any work
readers       texts, JSON, YAML, digests
locks         one process at a time
links         names below a folder of a stranger, without following links
whole         files and folders that are whole or not there; JSON lines
disk_cache    results of pure functions
"""

from .access import (
    NOT_THE_FILE,
    in_words,
    make_folder,
    refusal,
    require_file_place,
    require_folder_place,
    require_regular,
    writing,
)
from .disk_cache import VARIABLE, at_home, cache_folder, cached_array, cached_bytes, key_of, not_kept, to_be_filled
from .links import FolderBelow, below, refuse_link
from .locks import exclusive, forget_lock, locked
from .readers import (
    MOST_TEXT,
    digest,
    file_digest,
    fitting,
    parse_json,
    read_bytes,
    read_fields,
    read_json,
    read_text,
)
from .whole import (
    allocate,
    append_json_line,
    new_folder,
    read_json_lines,
    remove_leftovers,
    sync,
    temporary_name,
    write_bytes,
    write_json_lines,
    write_text,
)
