"""What training relies on: random access, splits, fingerprints, batches in any order, bytes to floats."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import Annotations, Batch, MemoryData, load_data, to_float
from scalelong.data.decode import convert_channels
from scalelong.errors import DataError, InvalidConfigError, ScaleLongError


@pytest.fixture(scope="module")
def digits():
    return load_data("digits")


def test_digits_are_the_real_ones(digits):
    assert (len(digits), digits.channels, digits.height, digits.width) == (1797, 1, 8, 8)
    assert digits.in_memory
    assert digits.classes == tuple("0123456789")
    assert not digits.has_captions
    everything = digits.fetch(range(1797))
    assert everything.images.dtype == torch.uint8
    assert everything.labels.dtype == torch.int64
    # The class counts that UCI publishes for this part, and the first image as every scikit-learn tutorial prints it.
    assert torch.bincount(everything.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    first = (everything.images[0, 0].float() * 16 / 255).round().int()
    assert first[:2].tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]


def test_fetch_keeps_the_order_and_repetitions(digits):
    batch = digits.fetch([5, 3, 5])
    assert isinstance(batch, Batch)
    assert torch.equal(batch.images[0], batch.images[2])
    assert batch.labels.tolist() == [5, 3, 5]
    assert batch.captions is None
    assert torch.equal(digits.fetch(torch.tensor([5, 3, 5])).images, batch.images)
    assert digits.fetch([]).images.shape == (0, 1, 8, 8)


@pytest.mark.parametrize("indices", [[-1], [1797]])
def test_indices_outside_are_named(digits, indices):
    with pytest.raises(IndexError, match="1797 images of 'digits'"):
        digits.fetch(indices)
    with pytest.raises(InvalidConfigError, match="whole numbers"):
        digits.fetch(torch.tensor([0.5]))


def test_split_is_a_partition_that_depends_on_the_seed_alone(digits):
    numbered = MemoryData("numbered", torch.arange(250, dtype=torch.uint8).view(-1, 1, 1, 1))
    train, held_out = numbered.split(50, seed=3)
    mine = train.fetch(range(200)).images.flatten().tolist()
    other = held_out.fetch(range(50)).images.flatten().tolist()
    assert sorted(mine + other) == list(range(250))
    assert other == numbered.split(50, seed=3)[1].fetch(range(50)).images.flatten().tolist()
    assert other != numbered.split(50, seed=4)[1].fetch(range(50)).images.flatten().tolist()
    deeper = train.split(20)[1]
    assert set(deeper.fetch(range(20)).images.flatten().tolist()) <= set(mine)


@pytest.mark.parametrize("held_out", [0, -1, 1797, 5000])
def test_split_refuses_an_empty_side(digits, held_out):
    with pytest.raises(InvalidConfigError, match="between 1 and 1796"):
        digits.split(held_out)


def test_fingerprint_follows_the_content_alone():
    images = torch.randint(0, 256, (10, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(10) % 2
    base = MemoryData("a", images, Annotations(labels, ("x", "y")))
    assert base.fingerprint() == MemoryData("b", images.clone(), Annotations(labels, ("x", "y"))).fingerprint()
    assert len(base.fingerprint()) == 64
    changed = images.clone()
    changed[7, 1, 2, 3] ^= 1
    others = [
        MemoryData("a", changed, Annotations(labels, ("x", "y"))),
        MemoryData("a", images, Annotations(1 - labels, ("x", "y"))),
        MemoryData("a", images, Annotations(labels, ("x", "z"))),
        MemoryData("a", images, Annotations(labels, ("x", "y"), ["text"] * 10)),
        MemoryData("a", images.view(10, 3, 2, 8), Annotations(labels, ("x", "y"))),
        base.split(2)[0],
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 7


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("digits", "821ebe45"),
        ("garments", "869bea1c"),
        ("portraits", "6b24aed3"),
        ("captioned-digits", "1fa32981"),
        ("shapes", "a4e83763"),
    ],
)
def test_fingerprints_never_change(name, begins):
    """A run keeps the fingerprint of its data and is refused with any other."""
    assert load_data(name, limit=100 if name == "shapes" else None).fingerprint().startswith(begins)


def test_limit_is_spread_over_the_set(digits):
    part = load_data("digits", limit=100)
    assert len(part) == 100
    assert torch.equal(part.fetch([50]).images, digits.fetch([50 * 1797 // 100]).images)
    assert len(load_data("digits", limit=5000)) == 1797


def test_size_and_channels_can_be_asked_for(digits):
    larger = load_data("digits", size=(24, 16), channels=3)
    assert larger.fetch([0]).images.shape == (1, 3, 24, 16)
    assert len(set(larger.fetch([0]).images[0, :, 12, 8].tolist())) == 1, "gray stays gray"
    for size in (32, 5):  # Pillow is another implementation of the same filter
        expected = Image.fromarray(digits.fetch([3]).images[0, 0].numpy()).resize(
            (size, size), Image.Resampling.BICUBIC
        )
        resized = load_data("digits", size=size).fetch([3]).images[0, 0].int()
        assert (resized - torch.from_numpy(np.array(expected)).int()).abs().max() <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": (8, -8)},
        {"size": "8"},
        {"channels": 2},
        {"limit": 0},
        {"memory_limit": -1},
        {"skip_broken": -1},
        {"skip_broken": 1.5},
        {"skip_broken": "all"},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        load_data("digits", **options)


@pytest.mark.parametrize(("name", "plain"), [("captioned-digits", "digits"), ("captioned-garments", "garments")])
def test_embedded_images_with_captions(name, plain):
    data, same = load_data(name), load_data(plain)
    assert torch.equal(data.fetch(range(50)).images, same.fetch(range(50)).images)
    captions = data.annotations.captions
    assert captions is not None
    assert len(set(captions)) == (30 if name == "captioned-digits" else 29)  # "trousers" has no article
    labels = same.fetch(range(len(same))).labels
    assert labels is not None
    # Every wording belongs to one class, so that a picture of it can be judged.
    assert len(set(zip(captions, labels.tolist(), strict=True))) == len(set(captions))
    seventh = {caption for caption, label in zip(captions, labels.tolist(), strict=True) if label == 7}
    assert ("the digit 7" if plain == "digits" else "a photograph of a sneaker") in seventh


def test_unknown_names_and_parts(tmp_path):
    with pytest.raises(DataError, match=r"no data at 'nowhere'.*digits, garments, portraits, shapes"):
        load_data("nowhere")
    with pytest.raises(DataError, match="no part 'test'"):
        load_data("digits", split="test")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ScaleLongError, match="not a data set"):
        load_data(tmp_path / "notes.txt")


def test_to_float_spans_minus_one_to_one():
    images = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 1, 2, 2).repeat(2, 3, 1, 1)
    plain = to_float(images)
    assert plain.dtype == torch.float32
    assert torch.allclose(plain[0, 0], torch.tensor([[-1.0, -0.6], [1.0, -0.2]]))
    flipped = to_float(images, torch.tensor([False, True]))
    assert torch.equal(flipped[0], plain[0])
    assert torch.equal(flipped[1], plain[1].flip(-1))
    recovered = ((to_float(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)) + 1) * 127.5).round()
    assert recovered.flatten().tolist() == list(range(256))


def test_the_example_of_the_docs_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    code = page.split("```python")[1].split("```")[0]
    exec(code, {})
    printed = capsys.readouterr().out.strip()
    assert printed == "digits: 1797 images, 1×16×16, 10 classes, in memory"
    assert printed in page


def test_channel_conversions_agree_with_pillow():
    rgba = np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    tensor = torch.from_numpy(rgba).permute(2, 0, 1)[None]
    ours = convert_channels(tensor, 3)
    assert (ours[0].permute(1, 2, 0).int() - torch.from_numpy(np.array(flat)).int()).abs().max() <= 1
    gray = np.array(Image.fromarray(rgba[..., :3]).convert("L"))
    assert np.array_equal(convert_channels(tensor[:, :3], 1)[0, 0].numpy(), gray)
    assert convert_channels(tensor[:, :1], 4)[0, 3].min() == 255
    with pytest.raises(InvalidConfigError, match="has 1 channels, which cannot become 2"):
        load_data("digits", channels=2)
