"""A folder with the authors' code."""

from pathlib import Path

from .errors import OfficialCheckoutError

FILES = ("libs/uvit.py", "libs/timm.py", "sde.py", "utils.py")


def checkout(path: str | Path) -> Path:
    root = Path(path)
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        raise OfficialCheckoutError(
            f"{root} is not a checkout of the authors' code: it has no {', '.join(missing)}. Clone "
            f"github.com/sail-sg/ScaleLong or github.com/baofff/U-ViT and give that folder to --official"
        )
    return root
