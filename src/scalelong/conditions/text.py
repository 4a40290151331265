"""Conditions that are texts. Captions are encoded once and kept on disk; other texts when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..data import Batch
from ..files import cached_array
from .base import ConditionError, Conditions

if TYPE_CHECKING:
    import numpy as np

CHUNK = 64


class TextEncoder(Protocol):
    length: int
    dim: int

    def fingerprint(self) -> str:
        """A hash of all that decides the tokens."""
        ...

    def encode(self, captions: Sequence[str]) -> Tensor:
        """(B, length, dim), float32. The empty text is the hidden condition."""
        ...

    def check(self, texts: Sequence[str]) -> None:
        """Raises ConditionError for texts that a model with this encoder cannot be asked for."""
        ...


class TextCondition(Conditions):
    def __init__(self, encoder: TextEncoder, guided: bool) -> None:
        """`guided`: some texts were hidden in training."""
        self.encoder, self.guided = encoder, guided
        self._null: Tensor | None = None

    def of(self, batch: Batch) -> Tensor:
        if batch.captions is None:
            raise ConditionError("condition 'text' needs captions, and these images have none")
        return self.encoder.encode(batch.captions)

    def ask(self, requests: Sequence[str]) -> Tensor:
        self.check(requests)
        return self.encoder.encode(requests)

    def check(self, requests: Sequence[str]) -> None:
        self.encoder.check(requests)

    def null(self) -> Tensor | None:
        if self.guided and self._null is None:
            self._null = self.encoder.encode([""])
        return self._null


class CachedCaptions:
    """A text encoder that finds the captions of a data set on disk."""

    def __init__(self, encoder: TextEncoder, rows: dict[str, int], tokens: np.ndarray) -> None:
        self.length, self.dim = encoder.length, encoder.dim
        self._encoder, self._rows, self._tokens = encoder, rows, tokens

    def fingerprint(self) -> str:
        return self._encoder.fingerprint()

    def check(self, texts: Sequence[str]) -> None:
        self._encoder.check(texts)

    def encode(self, captions: Sequence[str]) -> Tensor:
        if not all(caption in self._rows for caption in captions):
            return self._encoder.encode(captions)
        return torch.from_numpy(self._tokens[[self._rows[caption] for caption in captions]]).float()


def cache_captions(encoder: TextEncoder, captions: Sequence[str], say: Callable[[str], None] = print) -> CachedCaptions:
    """Encode every different caption once, and the empty one, in half precision: N x length x dim x 2 bytes."""
    texts = sorted({*captions, ""})
    about = {
        "encoder": encoder.fingerprint(),
        "captions": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
    }

    def compute() -> Iterator[np.ndarray]:
        for start in range(0, len(texts), CHUNK):
            yield encoder.encode(texts[start : start + CHUNK]).half().numpy()

    shape = (len(texts), encoder.length, encoder.dim)
    tokens = cached_array("captions", about, shape, "float16", compute, say)
    return CachedCaptions(encoder, {text: row for row, text in enumerate(texts)}, tokens)
