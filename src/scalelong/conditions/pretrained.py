"""A text encoder of transformers (CLIP, T5, BERT, ...) from a local folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingDependencyError
from ..files import file_digest
from .base import ConditionError


class PretrainedTextEncoder:
    """`folder` holds model and tokenizer, or has them in `text_encoder` and `tokenizer`, as in diffusers' pipelines.

    The weights are read when a text is encoded for the first time: a run with cached captions never needs them.
    """

    def __init__(self, folder: str | Path, length: int, dim: int) -> None:
        self.folder, self.length, self.dim = Path(folder).expanduser(), length, dim
        nested = (self.folder / "text_encoder").is_dir()
        self._model_folder = self.folder / "text_encoder" if nested else self.folder
        self._tokenizer_folder = self.folder / "tokenizer" if nested else self.folder
        if not (self._model_folder / "config.json").is_file():
            raise ConditionError(
                f"no text encoder in {self.folder}: {self._model_folder / 'config.json'} is not there. Put a text "
                f"encoder of transformers into this folder, for example openai/clip-vit-large-patch14"
            )

    def fingerprint(self) -> str:
        """A hash of all files of model and tokenizer."""
        sha = hashlib.sha256()
        for folder in (self._model_folder, self._tokenizer_folder):
            for path in sorted(folder.iterdir()):
                if path.is_file():
                    sha.update(f"{path.name} {file_digest(path)}\n".encode())
        return f"{sha.hexdigest()} {self.length}x{self.dim}"

    def check(self, texts: Sequence[str]) -> None:
        """It has tokens for every text."""

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Tensor:
        """The last hidden states, (B, length, dim). Longer texts are cut off, as CLIP was trained."""
        tokenizer, model = self._loaded
        tokens = tokenizer(
            list(captions), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        )
        # CLIP was trained without a mask over the padding, and the authors' features are made without one.
        output = model(input_ids=tokens["input_ids"]).last_hidden_state
        if output.shape[1:] != (self.length, self.dim):
            raise ConditionError(
                f"{self.folder} gives tokens of {tuple(output.shape[1:])} (length, dim), and the configuration says "
                f"text_length {self.length} and text_dim {self.dim}"
            )
        return output.float()

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        try:
            import transformers
        except ImportError as error:
            raise MissingDependencyError("transformers", "train", "encoding texts") from error
        try:
            kind = transformers.AutoConfig.from_pretrained(self._model_folder, local_files_only=True).model_type
            tokenizer = transformers.AutoTokenizer.from_pretrained(self._tokenizer_folder, local_files_only=True)
            # Of models with two towers or a decoder, the part that reads the text.
            name = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}.get(kind)
            model = getattr(transformers, name or "AutoModel").from_pretrained(
                self._model_folder, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConditionError(f"the text encoder in {self.folder} cannot be loaded: {error}") from error
        return tokenizer, model.eval()
