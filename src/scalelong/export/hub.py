"""An exported folder to the Hugging Face hub, where there is a network."""

from __future__ import annotations

from pathlib import Path

from ..errors import ExportError, MissingDependencyError


def push_to_hub(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Uploads a folder; the address of the commit. Who you are is what `huggingface-cli login` has stored."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", "train", "pushing to the hub") from error
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ExportError(
            f"{folder} could not be pushed to {repository}: {error}. The folder is complete; push it again when the "
            f"network and your token are there"
        ) from error
