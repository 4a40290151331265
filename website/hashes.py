"""`python -m website.hashes REPORT`: the report of `pip install --dry-run --report` as requirements with hashes."""

import json
import sys
from typing import Any


def requirements(report: dict[str, Any]) -> list[str]:
    """One line for each package that comes from an index: NAME==VERSION --hash=sha256:..."""
    lines = []
    for entry in report["install"]:
        digest = entry["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is not None:  # the project itself is a folder
            lines.append(f"{entry['metadata']['name']}=={entry['metadata']['version']} --hash=sha256:{digest}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(requirements(json.load(file))))
