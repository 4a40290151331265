"""Sampling with the inner part of a U at some steps only, against loops that keep the main path by hand."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.errors import CacheError, InvalidConfigError, VerificationError


class Block(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.runs = 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.conv(x) + self.time(t[:, None])[:, :, None, None])


class U(nn.Module):
    """Two long skips. `given` puts another main path into the outer merge, which is how the tests know the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = Block(3, 8), Block(8, 8)
        self.middle = Block(8, 8)
        self.inner_up, self.outer_up = Block(16, 8), Block(16, 8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def main_path(self, x: Tensor, t: Tensor) -> Tensor:
        inner = self.inner(self.first(x, t), t)
        return self.inner_up(torch.cat([self.middle(inner, t), inner], 1), t)

    def forward(self, x: Tensor, t: Tensor, given: Tensor | None = None) -> Tensor:
        first = self.first(x, t)
        inner = self.inner(first, t)
        h = self.inner_up(torch.cat([self.middle(inner, t), inner], 1), t)
        h = h if given is None else given
        return self.last(self.outer_up(torch.cat([h, first], 1), t))


def images(seed: int = 1, count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def sample(model, x: Tensor, steps: int = 7) -> Tensor:
    with torch.no_grad():
        for step in range(steps, 0, -1):
            x = x - 0.2 * model(x, torch.full((len(x),), step / steps))
    return x


def by_hand(model: U, x: Tensor, every: int, steps: int = 7) -> Tensor:
    kept = None
    with torch.no_grad():
        for number, step in enumerate(range(steps, 0, -1)):
            t = torch.full((len(x),), step / steps)
            kept = model.main_path(x, t) if number % every == 0 else kept
            x = x - 0.2 * model(x, t, kept)
    return x


@pytest.fixture
def model() -> U:
    torch.manual_seed(0)
    return U().eval()


@pytest.mark.parametrize("every", [2, 3, 10])
def test_it_keeps_the_main_path_of_the_last_full_step(model, every):
    wanted = by_hand(model, images(), every)
    with sl.cached(model, every=every) as cache:
        found = sample(model, images())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not torch.equal(found, sample(model, images()))
    assert (cache.full_steps, cache.cached_steps) == (-(-7 // every), 7 - -(-7 // every))


@pytest.mark.parametrize("scaling", ["none", "cs", "ls"])
def test_every_step_is_bit_identical(scaling):
    torch.manual_seed(0)
    for network in (U().eval(), sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2).eval()):
        if scaling != "none":
            sl.scale_skips_(network, scaling, (images(), torch.rand(2)))
        wanted = sample(network, images())
        with sl.cached(network, every=1):
            assert torch.equal(sample(network, images()), wanted)


@pytest.mark.parametrize("scaling", ["cs", "ls"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_scaled_network(model, scaling, depth):
    sl.scale_skips_(model, scaling, (images(), torch.rand(2)))
    plain = sample(model, images())
    with sl.cached(model, depth=depth, every=2) as cache:
        found = sample(model, images())
    assert cache.cached_steps == 3
    assert 0 < float((found - plain).norm() / plain.norm()) < 0.5
    assert torch.equal(sample(model, images()), plain)


def test_the_inner_modules_do_not_run(model):
    with sl.cached(model, every=4, verify=False) as cache:
        sample(model, images(), steps=1)  # records the forward
        cache.reset()
        before = {name: block.runs for name, block in model.named_modules() if isinstance(block, Block)}
        sample(model, images(), steps=8)
    runs = {name: model.get_submodule(name).runs - count for name, count in before.items()}
    assert runs == {"first": 8, "inner": 2, "middle": 2, "inner_up": 2, "outer_up": 8}


def test_nothing_is_left_behind(model):
    wanted = sample(model, images())
    hooks = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in model.named_modules()}
    with sl.cached(model, every=3):
        sample(model, images())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert hooks == {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in model.named_modules()}
    assert torch.equal(sample(model, images()), wanted)


def test_an_error_inside_leaves_the_model_as_it_was(model):
    with pytest.raises(sl.ExampleInputsError, match="expected input"), sl.cached(model, every=3):
        sample(model, torch.zeros(2, 4, 8, 8))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_new_image_begins_with_a_full_step(model):
    with sl.cached(model, every=3):
        alone = sample(model, images(5))
    with sl.cached(model, every=3) as cache:
        sample(model, images(4))
        assert torch.equal(sample(model, images(5)), alone)
        assert torch.equal(sample(model, images(5, count=4))[:2], sample(model, images(5, count=4))[:2])
    assert cache.full_steps == 12


def test_guidance_in_two_forwards_keeps_two_caches(model):
    def guided(x, t):
        return 2 * model(x, t) - model(x.flip(-1), t)

    with sl.cached(model, every=3) as cache:
        found = sample(guided, images())
    a, x = {}, images()
    with torch.no_grad():
        for number, step in enumerate(range(7, 0, -1)):
            t = torch.full((2,), step / 7)
            views = (x, x.flip(-1))
            if number % 3 == 0:
                a = {n: model.main_path(view, t) for n, view in enumerate(views)}
            x = x - 0.2 * (2 * model(views[0], t, a[0]) - model(views[1], t, a[1]))
    assert torch.equal(found, x)
    assert (cache.full_steps, cache.cached_steps) == (6, 8)


class Untimed(nn.Module):
    def __init__(self, model: U) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, level: Tensor) -> Tensor:
        return self.model(image, level)


def test_a_time_by_another_name(model):
    wanted = by_hand(model, images(), 3)
    untimed = Untimed(model).eval()
    with pytest.raises(CacheError, match=r"its arguments: image, level; .*time="), sl.cached(untimed, every=3):
        sample(untimed, images())
    with pytest.raises(CacheError, match=r"level changed .*time='level'"), sl.cached(untimed, every=3, passes=1):
        sample(untimed, images())
    with sl.cached(untimed, every=3, time="level"):
        assert torch.equal(sample(untimed, images()), wanted)


def test_a_model_without_a_time(model):
    class Timeless(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x, torch.ones(len(x)))

    timeless = Timeless().eval()
    kept, x = {}, images()
    with torch.no_grad(), sl.cached(timeless, every=2, passes=2):
        y = images()
        for _ in range(4):
            y = y - 0.2 * (timeless(y) + timeless(-y))
        for step in range(4):
            if step % 2 == 0:
                kept = {sign: model.main_path(sign * x, torch.ones(2)) for sign in (1, -1)}
            x = x - 0.2 * sum(model(sign * x, torch.ones(2), kept[sign]) for sign in (1, -1))
    torch.testing.assert_close(y, x, rtol=0, atol=0)


def test_the_steps_may_be_named(model):
    kept, x = None, images()
    with torch.no_grad():
        for number, step in enumerate(range(7, 0, -1)):
            t = torch.full((2,), step / 7)
            kept = model.main_path(x, t) if number in (0, 1, 4) else kept
            x = x - 0.2 * model(x, t, kept)
    with sl.cached(model, full=[0, 1, 4]):
        assert torch.equal(sample(model, images()), x)
    with sl.cached(model, full=lambda step: step in (0, 1, 4)):
        assert torch.equal(sample(model, images()), x)


class Popping(U):
    """Blocks that take their skips from a shared list, and a caller that writes into what it was given."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16, 8)

        def forward(self, x: Tensor, t: Tensor, skips: list[Tensor]) -> Tensor:
            return self.block(torch.cat([x, skips.pop()], 1), t)

    def __init__(self) -> None:
        super().__init__()
        self.inner_up, self.outer_up = Popping.Up(), Popping.Up()  # pyright: ignore

    def forward(self, x: Tensor, t: Tensor, given: Tensor | None = None) -> Tensor:
        skips = [self.first(x, t)]
        skips.append(self.inner(skips[-1], t))
        h = self.inner_up(self.middle(skips[-1], t), t, skips).mul_(0.5)
        h = h if given is None else given
        return self.last(self.outer_up(h, t, skips))

    def main_path(self, x: Tensor, t: Tensor) -> Tensor:
        inner = self.inner(self.first(x, t), t)
        return self.inner_up(self.middle(inner, t), t, [inner]).mul_(0.5)


def test_shared_lists_and_writing_in_place():
    torch.manual_seed(0)
    model = Popping().eval()
    wanted = by_hand(model, images(), 3)
    with sl.cached(model, every=3):
        assert torch.equal(sample(model, images()), wanted)


class OutsideOfModules(U):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # pyright: ignore
        first = self.first(x, t)
        inner = self.inner(first, t)
        h = self.inner_up(torch.cat([self.middle(inner, t), inner], 1), t) * t.view(-1, 1, 1, 1)
        return self.last(self.outer_up(torch.cat([h, first], 1), t))


def test_a_main_path_of_this_step_is_refused():
    torch.manual_seed(0)
    model = OutsideOfModules().eval()
    with pytest.raises(CacheError, match="outside any module"), sl.cached(model):
        sample(model, images())
    assert all("forward" not in module.__dict__ for module in model.modules())


class Remembering(U):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # pyright: ignore
        y = super().forward(x, t)
        return y + torch.randn(y.shape, generator=torch.Generator().manual_seed(int(torch.seed()) % 2**31))


def test_what_cannot_be_repeated_is_refused():
    torch.manual_seed(0)
    model = Remembering().eval()
    with pytest.raises(VerificationError, match="differs by"), sl.cached(model):
        sample(model, images())


def test_what_is_refused(model):
    with pytest.raises(InvalidConfigError, match="every must be"):
        sl.cached(model, every=0)
    with pytest.raises(InvalidConfigError, match="depth must be"):
        sl.cached(model, depth=0)
    with pytest.raises(InvalidConfigError, match="has no 0"):
        sl.cached(model, full=[1, 2])
    with pytest.raises(CacheError, match="there are 2 long skips"), sl.cached(model, depth=3):
        sample(model, images())
    with pytest.raises(CacheError, match=r"sampling: call model\.eval"), sl.cached(model.train()):
        sample(model, images())
    with pytest.raises(CacheError, match=r"torch\.no_grad"), sl.cached(model.eval()):
        model(images(), torch.ones(2))
    with sl.cached(model), pytest.raises(CacheError, match="already"), sl.cached(model):
        pass
    with sl.cached(model), torch.no_grad():
        model(images(), torch.ones(2))
        with pytest.raises(CacheError, match="the size of its inputs"):
            model(images(count=3), torch.full((3,), 0.9))


def test_a_condition_that_changes():
    torch.manual_seed(0)
    model = sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2, classes=4).eval()
    with sl.cached(model), torch.no_grad():
        model(images(), torch.full((2,), 900.0), torch.tensor([1, 2]))
        model(images(), torch.full((2,), 800.0), torch.tensor([1, 2]))
        with pytest.raises(CacheError, match="y changed in the middle"):
            model(images(), torch.full((2,), 700.0), torch.tensor([1, 3]))


def test_a_pipeline_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unet = diffusers.UNet2DModel(
            sample_size=8,
            block_out_channels=(16, 16),
            norm_num_groups=4,
            layers_per_block=1,
            down_block_types=("DownBlock2D",) * 2,
            up_block_types=("UpBlock2D",) * 2,
        ).eval()
        pipeline = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def draw():
        return pipeline(
            generator=torch.Generator().manual_seed(0), num_inference_steps=6, output_type="np", return_dict=False
        )[0]

    plain = draw()
    with sl.cached(unet, depth=1, every=1):
        assert (draw() == plain).all()
    with sl.cached(unet, depth=1, every=3) as cache:
        first, second = draw(), draw()
    assert (first == second).all()
    assert cache.share > 0.5
    assert (cache.full_steps, cache.cached_steps) == (4, 8)


def test_a_run_is_sampled_with_a_cache():
    from scalelong.diffusion import SampleSettings

    assert SampleSettings(cache="every=3,depth=2").cache_options() == {"every": 3, "depth": 2}
    for bad in ("every", "every=0", "width=3", "every=x"):
        with pytest.raises(InvalidConfigError, match="every=3,depth=1"):
            SampleSettings(cache=bad)
