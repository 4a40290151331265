"""Classes, words, a real (tiny, random) CLIP text encoder, and caches that notice damage."""

from pathlib import Path

import pytest
import torch

from scalelong.data import Batch
from scalelong.diffusion import ClassCondition, HashedWords, PretrainedTextEncoder, TextCondition, Unconditional
from scalelong.diffusion.conditions import ConditionError, cache_captions


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))


def batch(captions: list[str] | None = None, labels: list[int] | None = None) -> Batch:
    count = len(captions or labels or [0])
    return Batch(
        torch.zeros(count, 1, 2, 2, dtype=torch.uint8), None if labels is None else torch.tensor(labels), captions
    )


def test_classes() -> None:
    condition = ClassCondition(["cat", "dog", "7"], guided=True)
    assert condition.from_batch(batch(labels=[2, 0])).tolist() == [2, 0]
    assert condition.from_prompts(["dog", "0", "7"]).tolist() == [1, 0, 2]
    hidden = condition.drop(torch.tensor([0, 1, 2]), torch.tensor([True, False, True]))
    assert hidden is not None
    assert hidden.tolist() == [3, 1, 3]
    for wrong in ("bird", "3", "-1", ""):
        with pytest.raises(ConditionError, match="no class"):
            condition.from_prompts([wrong])
    with pytest.raises(ConditionError, match="labels"):
        condition.from_batch(batch(["a"]))
    unguided = ClassCondition(["cat"], guided=False)
    assert unguided.null() is None
    kept = unguided.drop(torch.tensor([0]), torch.tensor([True]))
    assert kept is not None
    assert kept.tolist() == [0]


def test_without_conditions_nothing_can_be_asked() -> None:
    assert Unconditional().from_batch(batch()) is None
    assert Unconditional().from_prompts([]) is None
    with pytest.raises(ConditionError, match="without conditions"):
        Unconditional().from_prompts(["a cat"])


def test_words_are_tokens_with_vectors_of_their_own() -> None:
    encoder = HashedWords(6, 64)
    tokens = encoder.encode(["A red circle!", "a blue  circle", ""])
    assert tokens.shape == (3, 6, 64)
    assert torch.equal(tokens[0, 0], tokens[1, 0])
    assert torch.equal(tokens[0, 2], tokens[1, 2])
    assert not torch.equal(tokens[0, 1], tokens[1, 1])
    assert tokens[2].abs().sum() == 0
    assert tokens[0, 3:].abs().sum() == 0
    # Nearly orthogonal: a random pair of sign vectors overlaps by about 1/8 in 64 dimensions.
    words = encoder.encode([" ".join(f"word{i}{j}" for j in range(6)) for i in range(5)]).flatten(0, 1)
    overlap = (words @ words.T / 64).fill_diagonal_(0)
    assert overlap.abs().max() < 0.6
    assert torch.equal(HashedWords(6, 64).encode(["a red"]), encoder.encode(["a red"]))
    with pytest.raises(ConditionError, match="7 words"):
        encoder.encode(["one two three four five six seven"])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text encoder and a tokenizer of transformers, small and with random weights, saved as CLIP's are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("clip")
    words = ["<pad>", "<unk>", "<end>", "a", "red", "blue", "circle", "square"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", model_max_length=8
    ).save_pretrained(folder)
    torch.manual_seed(0)
    CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
            eos_token_id=2,
            bos_token_id=2,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


def test_a_text_encoder_of_transformers(clip: Path) -> None:
    from transformers import AutoTokenizer, CLIPTextModel

    encoder = PretrainedTextEncoder(clip, 8, 16)
    tokens = encoder.encode(["a red circle", "a blue square"])
    ids = AutoTokenizer.from_pretrained(clip)(["a red circle"], padding="max_length", max_length=8, return_tensors="pt")
    with torch.no_grad():
        expected = CLIPTextModel.from_pretrained(clip)(input_ids=ids["input_ids"]).last_hidden_state
    torch.testing.assert_close(tokens[:1], expected)
    assert not torch.allclose(tokens[0], tokens[1])
    with pytest.raises(ConditionError, match=r"\(8, 16\).*`text_dim` 768"):
        PretrainedTextEncoder(clip, 8, 768).encode(["a"])
    with pytest.raises(ConditionError, match="no text encoder in"):
        PretrainedTextEncoder(clip / "absent", 8, 16)


def test_captions_are_encoded_once(clip: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    encoder = PretrainedTextEncoder(clip, 8, 16)
    caplog.set_level("INFO", "scalelong.files")
    captions = ["a red circle", "a blue square", "a red circle"]
    expected = encoder.encode([*captions, ""])
    cached = cache_captions(encoder, captions)
    torch.testing.assert_close(cached.encode([*captions, ""]), expected, atol=2e-3, rtol=2e-3)
    assert len(caplog.records) == 1
    again = cache_captions(PretrainedTextEncoder(clip, 8, 16), captions)
    assert len(caplog.records) == 1
    monkeypatch.setattr(PretrainedTextEncoder, "loaded", property(lambda _: pytest.fail("the encoder was loaded")))
    condition = TextCondition(again, guided=True)
    assert condition.from_batch(batch(captions)).shape == (3, 8, 16)
    hidden = condition.drop(condition.from_batch(batch(captions)), torch.tensor([True, False, False]))
    assert hidden is not None
    assert torch.equal(hidden[0], again.encode([""])[0])
    assert torch.equal(hidden[1:], again.encode(captions[1:]))
    monkeypatch.undo()
    assert torch.equal(cached.encode(["a blue circle"]), encoder.encode(["a blue circle"])), (
        "other texts when asked for"
    )
