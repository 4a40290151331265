"""A text encoder without weights: each word is a token with a fixed vector of ±1 that comes from its hash.

Different words are nearly orthogonal, so the network's first linear layer learns what they mean. It needs no
vocabulary and no download, and is enough for captions like "a red circle at the top left".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .base import ConditionError


class WordEncoder:
    def __init__(self, length: int, dim: int, vocabulary: Iterable[str] | None = None) -> None:
        """`vocabulary`: the words that the network has seen; None if that is not known."""
        self.length, self.dim = length, dim
        self.vocabulary = None if vocabulary is None else frozenset(vocabulary)
        self._vectors: dict[str, Tensor] = {}

    def fingerprint(self) -> str:
        return f"words {self.length}x{self.dim}"

    def encode(self, captions: Sequence[str]) -> Tensor:
        """(B, length, dim); places without a word are zero."""
        tokens = torch.zeros(len(captions), self.length, self.dim)
        for row, caption in zip(tokens, captions, strict=True):
            words = words_of(caption)
            if len(words) > self.length:
                raise ConditionError(
                    f"{caption!r} has {len(words)} words and the model was made for {self.length}; shorten it, or "
                    f"train with a larger text_length"
                )
            for place, word in enumerate(words):
                row[place] = self._vector(word)
        return tokens

    def check(self, texts: Sequence[str]) -> None:
        unknown = {word for text in texts for word in words_of(text)} - (self.vocabulary or set())
        if self.vocabulary is not None and unknown:
            raise ConditionError(
                f"no caption that the model was trained on has the word {', '.join(sorted(unknown))}; it knows "
                f"{', '.join(sorted(self.vocabulary)[:50])}"
            )
        self.encode(texts)

    def _vector(self, word: str) -> Tensor:
        if word not in self._vectors:
            digest = hashlib.shake_128(word.encode()).digest(-(-self.dim // 8))
            bits = [byte >> shift & 1 for byte in digest for shift in range(8)]
            self._vectors[word] = torch.tensor(bits[: self.dim], dtype=torch.float32) * 2 - 1
        return self._vectors[word]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
