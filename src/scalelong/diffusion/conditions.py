"""Conditions: what a network knows about an image apart from x_t and t. Nothing, a class, or a text.

`Conditions` is the one view that training and sampling have of them: tensors with one row per image. Below it stand
classes, texts, and the encoders that turn texts into tokens.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..data import Batch
from ..errors import ConditionError
from ..files import at_home, cached_array, file_digest, in_words
from ..optional import needs

if TYPE_CHECKING:
    import numpy as np


class Conditions(ABC):
    """Whole numbers (B,) are labels, floating-point tensors (B, length, dim) are the tokens of a text."""

    @abstractmethod
    def from_batch(self, batch: Batch) -> Tensor | None:
        """The conditions of the images of a batch."""

    @abstractmethod
    def from_prompts(self, prompts: Sequence[str]) -> Tensor | None:
        """The conditions that a person names: classes or texts."""

    def check(self, prompts: Sequence[str]) -> None:
        """Raise ConditionError if one of the prompts cannot be drawn."""
        self.from_prompts(prompts)

    @abstractmethod
    def null(self) -> Tensor | None:
        """The null condition, which broadcasts over the batch; None if the model was trained without one."""

    def drop(self, values: Tensor | None, dropped: Tensor) -> Tensor | None:
        """The null condition where `dropped` (B,) is true."""
        null = self.null()
        if values is None or null is None:
            return values
        return torch.where(dropped.view(-1, *[1] * (values.dim() - 1)), null, values)


class Unconditional(Conditions):
    """No condition at all."""

    def from_batch(self, batch: Batch) -> None:  # noqa: ARG002
        return None

    def from_prompts(self, prompts: Sequence[str]) -> None:
        if prompts:
            said = f"{prompts[0]!r} was asked for, but this model was trained without conditions"
            raise ConditionError(f"{said}; leave the prompt out, or train with `condition` class or text")

    def null(self) -> None:
        return None


# Classes, by name or by number


class ClassCondition(Conditions):
    def __init__(self, classes: Sequence[str], guided: bool) -> None:
        """`guided`: some labels were dropped in training, so that there is a null label, the last one."""
        self.classes, self.guided = tuple(classes), guided

    def from_batch(self, batch: Batch) -> Tensor:
        if batch.labels is None:
            raise ConditionError("condition 'class' needs labels, and these images have none")
        return batch.labels

    def from_prompts(self, prompts: Sequence[str]) -> Tensor:
        return torch.tensor([self._number(prompt) for prompt in prompts], dtype=torch.long)

    def null(self) -> Tensor | None:
        return torch.tensor(len(self.classes)) if self.guided else None

    def _number(self, prompt: str) -> int:
        if prompt in self.classes:
            return self.classes.index(prompt)
        if prompt.isdecimal() and len(prompt) < 19 and int(prompt) < len(self.classes):
            return int(prompt)
        shown = ", ".join(self.classes[:20]) + (", ..." if len(self.classes) > 20 else "")
        raise ConditionError(f"there is no class {prompt!r}; there are {len(self.classes)}: {shown}, or numbers from 0")


class HashedWords:
    """A text encoder without weights: each word is a token with a fixed vector of ±1 that comes from its hash.

    Different words are nearly orthogonal, so the network's first linear layer learns what they mean. It needs no
    vocabulary and no download, and is enough for captions like "a red circle at the top left".
    """

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
                said = f"{caption!r} has {len(words)} words and the model was made for {self.length}"
                raise ConditionError(f"{said}; shorten it, or train with a larger `text_length`")
            for place, word in enumerate(words):
                row[place] = self._vector(word)
        return tokens

    def check(self, texts: Sequence[str]) -> None:
        unknown = {word for text in texts for word in words_of(text)} - (self.vocabulary or set())
        if self.vocabulary is not None and unknown:
            raise ConditionError(
                f"no caption that the model was trained on has the word {', '.join(sorted(unknown))}; it knows "
                f"{', '.join(sorted(self.vocabulary)[:50])}. Use these words in `prompts`"
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


# Texts. Captions are encoded once and kept on disk; prompts when they are given.

CHUNK = 64


class TextEncoder(Protocol):
    length: int
    dim: int

    def fingerprint(self) -> str:
        """A hash of all that decides the tokens."""
        ...

    def encode(self, captions: Sequence[str]) -> Tensor:
        """(B, length, dim), float32. The empty text is the null condition."""
        ...

    def check(self, texts: Sequence[str]) -> None:
        """Raise ConditionError for texts that a model with this encoder cannot draw."""
        ...


class TextCondition(Conditions):
    def __init__(self, encoder: TextEncoder, guided: bool) -> None:
        """`guided`: some texts were dropped in training, so that the empty text is the null condition."""
        self.encoder, self.guided = encoder, guided
        self._null: Tensor | None = None

    def from_batch(self, batch: Batch) -> Tensor:
        if batch.captions is None:
            raise ConditionError("condition 'text' needs captions, and these images have none")
        return self.encoder.encode(batch.captions)

    def from_prompts(self, prompts: Sequence[str]) -> Tensor:
        self.check(prompts)
        return self.encoder.encode(prompts)

    def check(self, prompts: Sequence[str]) -> None:
        self.encoder.check(prompts)

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


def cache_captions(encoder: TextEncoder, captions: Sequence[str]) -> CachedCaptions:
    """Encode every different caption once, and the empty one, in half precision: N x length x dim x 2 bytes."""
    texts = sorted({*captions, ""})
    captions_digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    about = {"encoder": encoder.fingerprint(), "captions": captions_digest}

    def compute() -> Iterator[np.ndarray]:
        for start in range(0, len(texts), CHUNK):
            yield encoder.encode(texts[start : start + CHUNK]).half().numpy()

    shape = (len(texts), encoder.length, encoder.dim)
    tokens = cached_array("captions", about, shape, "float16", compute)
    return CachedCaptions(encoder, {text: row for row, text in enumerate(texts)}, tokens)


# A text encoder of transformers (CLIP, T5, BERT, ...) from a local folder.


class PretrainedTextEncoder:
    """`folder` holds model and tokenizer, or has them in `text_encoder` and `tokenizer`, as in diffusers' pipelines.

    The weights are read when a text is encoded for the first time: a run with cached captions never needs them.
    """

    def __init__(self, folder: str | Path, length: int, dim: int) -> None:
        self.folder, self.length, self.dim = at_home(folder, "`text_encoder`"), length, dim
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
        tokenizer, model = self.loaded
        tokens = tokenizer(
            list(captions), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        )
        # CLIP was trained without a mask over the padding, and the authors' features are made without one.
        output = model(input_ids=tokens["input_ids"]).last_hidden_state
        if output.shape[1:] != (self.length, self.dim):
            raise ConditionError(
                f"{self.folder} gives tokens of {tuple(output.shape[1:])} (length, dim), and the configuration says "
                f"`text_length` {self.length} and `text_dim` {self.dim}: set them to those"
            )
        return output.float()

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The tokenizer and the model, of transformers."""
        transformers = needs("transformers", "text", "encoding texts")
        try:
            local = {"local_files_only": True, "trust_remote_code": False}
            kind = transformers.AutoConfig.from_pretrained(self._model_folder, **local).model_type
            tokenizer = transformers.AutoTokenizer.from_pretrained(self._tokenizer_folder, **local)
            # Of models with two towers or a decoder, the part that reads the text.
            name = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}.get(kind)
            model = getattr(transformers, name or "AutoModel").from_pretrained(
                self._model_folder, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConditionError(
                f"the text encoder in {self.folder} cannot be loaded ({in_words(error)}): check "
                f"`text_encoder`, or download it again"
            ) from error
        return tokenizer, model.eval()
