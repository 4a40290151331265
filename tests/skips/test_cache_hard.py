"""What a cache meets that nobody planned: each is right, or refused by name."""

import copy
import itertools
import pickle
import re
import threading
import warnings
from typing import Any

import pytest
import torch
from test_cache import U, by_hand, images, sample
from torch import Tensor, nn

import scalelong as sl
from scalelong.errors import CacheError, InvalidConfigError, UnsupportedModelError


@pytest.fixture
def model() -> U:
    torch.manual_seed(0)
    return U().eval()


def at(value: float, count: int = 2) -> Tensor:
    return torch.full((count,), value)


# In place


def test_in_place_and_back(model):
    wanted, plain = by_hand(model, images(), 3), sample(model, images())
    cache = sl.cache_(model, depth=1, every=3)
    assert torch.equal(sample(model, images()), wanted)
    assert torch.equal(sample(model, images()), wanted)
    assert (cache.full_steps, cache.cached_steps) == (6, 8)
    assert sl.uncache_(model) is model
    assert torch.equal(sample(model, images()), plain)
    assert all("forward" not in module.__dict__ for module in model.modules())
    with pytest.raises(CacheError, match="has no cache"):
        sl.uncache_(model)


def test_a_context_may_be_entered_again_and_checks_once(model):
    wanted = by_hand(model, images(), 3)
    cache = sl.cached(model, every=3)
    with cache:
        assert torch.equal(sample(model, images()), wanted)
    runs = model.first.runs
    with cache:
        assert torch.equal(sample(model, images()), wanted)
    assert model.first.runs - runs == 7
    assert (cache.full_steps, cache.cached_steps) == (6, 8)


# Which step is it?


def test_another_image_after_a_single_step_is_never_given_the_cache_of_the_first(model):
    alone = by_hand(model, images(5), 3)
    with sl.cached(model, every=3), torch.no_grad():
        model(images(4), at(0.5))  # an image of one step, at another time than the next one begins with
        assert torch.equal(sample(model, images(5)), alone)
    for steps in (3, 2):  # at the same time: nobody can tell it from a second forward of one step

        def both(steps=steps) -> None:
            with sl.cached(model, every=3):
                sample(model, images(4), steps=1)
                sample(model, images(5), steps=steps)

        with pytest.raises(CacheError, match=r"2 forwards .* next one 1.*reset\(\)"):
            both()
    with sl.cached(model, every=3) as cache:
        sample(model, images(4), steps=1)
        cache.reset()
        assert torch.equal(sample(model, images(5)), alone)


def test_a_time_that_rises_begins_with_two_full_steps_once(model):
    def loop(times: list[float], full: set[int]) -> bool:
        found = wanted = images()
        kept = None
        for number, time in enumerate(times):
            found = found - 0.2 * model(found, at(time))
            kept = other.main_path(wanted, at(time)) if number in full else kept
            wanted = wanted - 0.2 * other(wanted, at(time), kept)
        return torch.equal(found, wanted)

    other = copy.deepcopy(model)
    up, down = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.5, 0.4, 0.3, 0.2, 0.1]
    with sl.cached(model, every=3), torch.no_grad():
        assert loop(up, {0, 1, 4})
        assert loop(up, {0, 3})
        assert loop(down, {0, 3})  # as after an inversion
        assert loop(down, {0, 3})


def test_guidance_in_a_part_of_the_steps_and_in_any_order():
    torch.manual_seed(0)
    model = sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2, classes=4).eval()
    c, null = torch.tensor([1, 2]), torch.tensor([3, 3])
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    x = images()
    with torch.no_grad(), sl.cached(model, every=2), sl.cached(one, every=2), sl.cached(two, every=2):
        for step, time in enumerate((900.0, 700.0, 500.0, 300.0)):
            wanted = [one(x, at(time), y=c), two(x, at(time), y=null)]
            both = [(0, c), (1, null)] if step != 1 else [(1, null), (0, c)]
            for number, condition in both if step < 3 else both[:1]:
                assert torch.equal(model(x, at(time), y=condition), wanted[number])
            x = x - 0.1 * wanted[0]


def test_heun_and_repeated_times(model):
    """Two forwards at one time: a second slot of the step, or with passes=1 a step of its own."""
    times = [0.9, 0.7, 0.7, 0.5, 0.5, 0.3]
    other, x, kept = copy.deepcopy(model), images(), {}
    with torch.no_grad(), sl.cached(model, every=3, passes=1) as cache:
        for number, time in enumerate(times):
            kept = other.main_path(x, at(time)) if number % 3 == 0 else kept
            assert torch.equal(model(x, at(time)), other(x, at(time), kept))
            x = x - 0.1 * model.last(torch.zeros(2, 8, 8, 8))
    assert (cache.full_steps, cache.cached_steps) == (2, 4)
    with torch.no_grad(), sl.cached(model, every=10) as cache:
        for time in times[:5]:
            model(x, at(time))
    assert (cache.full_steps, cache.cached_steps) == (2, 3)


def test_too_many_forwards_at_one_time(model):
    with torch.no_grad(), sl.cached(model, verify=False):
        for _ in range(64):
            model(images(), at(0.5))
        with pytest.raises(CacheError, match="are no sampling"):
            model(images(), at(0.5))


def test_names_of_arguments(model):
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    packed, wanted = Packed().eval(), by_hand(model, images(), 3)
    with sl.cached(packed, every=3):
        assert torch.equal(sample(lambda x, t: packed(x, t=t), images()), wanted)
    with sl.cached(packed, every=3, time="args[1]"):
        assert torch.equal(sample(packed, images()), wanted)
    with pytest.raises(CacheError, match=r"args\[0\], args\[1\]"), sl.cached(packed, every=3):
        sample(packed, images())

    class TimeFirst(Packed):
        def forward(self, t, x):
            return self.model(x, t)

    first = TimeFirst().eval()
    with sl.cached(first, every=3):
        assert torch.equal(sample(lambda x, t: first(t, x), images()), wanted)


# Conditions


class Conditional(U):
    def forward(self, x, t, y=None, strength: float = 1.0, swap: bool = False):  # pyright: ignore
        out = super().forward(x if y is None else x + y, t)
        return out.flip(-1) * strength if swap else out * strength


def test_conditions_of_any_kind_that_change_are_refused():
    torch.manual_seed(0)
    model = Conditional().eval()
    y = torch.ones(2, 3, 8, 8)
    for change in ({"strength": 2.0}, {"swap": True}, {"y": y + 1}, {}):
        with torch.no_grad(), sl.cached(model):
            model(images(), at(0.9), y=y, strength=1.0)
            model(images(), at(0.8), y=y.clone(), strength=1.0)
            with pytest.raises(CacheError, match="changed in the middle"):
                model(images(), at(0.7), **({"y": y, "strength": 1.0} | change if change else {}))
    with torch.no_grad(), sl.cached(model):
        model(images(), at(0.9), y=y)
        y += 1
        with pytest.raises(CacheError, match="y changed in the middle"):
            model(images(), at(0.8), y=y)
    with torch.inference_mode(), sl.cached(model):
        z = torch.ones(2, 3, 8, 8)
        model(images(), at(0.9), y=z)
        z += 1
        with pytest.raises(CacheError, match="y changed in the middle"):
            model(images(), at(0.8), y=z)


# What goes wrong in the middle


def test_after_an_exception_the_next_image_is_right(model):
    class StopError(Exception):
        pass

    for error in (StopError, KeyboardInterrupt):
        for when in (0, 1):

            def fail(*_: object, error=error) -> None:
                raise error

            wanted = by_hand(model, images(), 3)
            with torch.no_grad(), sl.cached(model, every=3):
                sample(model, images())
                for time in (0.9, 0.8)[:when]:
                    model(images(4), at(time))
                handle = model.outer_up.register_forward_hook(fail)
                with pytest.raises(error):
                    model(images(4), at(0.7))
                handle.remove()
                assert torch.equal(sample(model, images()), wanted)


def test_a_refused_model_is_not_used_unchecked_at_the_next_call():
    class Drawing(U):
        def forward(self, x, t):  # pyright: ignore
            return super().forward(x, t) + torch.randn(1, generator=torch.Generator().manual_seed(torch.seed() % 2**31))

    torch.manual_seed(0)
    model = Drawing().eval()
    sl.cache_(model)
    for _ in range(2):
        with pytest.raises(sl.VerificationError):
            sample(model, images())
    assert all("forward" not in module.__dict__ for module in model.modules())
    sl.uncache_(model)


def test_a_network_that_decides_by_its_inputs_is_refused():
    class Deciding(U):
        def forward(self, x, t):  # pyright: ignore
            first = self.first(x, t)
            inner = self.inner(first, t)
            middle = self.middle(inner, t) if t[0] > 0.5 else inner
            h = self.inner_up(torch.cat([middle, inner], 1), t)
            return self.last(self.outer_up(torch.cat([h, first], 1), t))

    torch.manual_seed(0)
    model = Deciding().eval()
    with pytest.raises(CacheError, match="called middle 0 times instead of 1"), sl.cached(model):
        sample(model, images())


def test_writing_into_what_is_kept_without_a_check():
    from test_cache import Popping

    torch.manual_seed(0)
    model = Popping().eval()
    wanted = by_hand(model, images(), 3)
    with sl.cached(model, every=3, verify=False):
        assert torch.equal(sample(model, images()), wanted)


def test_gradients_are_refused_wherever_they_come_from(model):
    model.requires_grad_(False)
    with sl.cached(model), pytest.raises(CacheError, match=r"torch\.no_grad"):
        model(images().requires_grad_(), at(0.9))
    model.outer_up.train()
    with sl.cached(model), torch.no_grad(), pytest.raises(CacheError, match=r"model\.eval"):
        model(images(), at(0.9))


def test_copies_and_pickles_are_refused_inside(model):
    with sl.cached(model):
        sample(model, images(), steps=2)
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(CacheError, match="cannot be copied or pickled"):
                take(model)
        assert list(model.state_dict()) == list(U().state_dict())
    copy.deepcopy(model)


def test_threads(model):
    """A second loop in another thread is refused; one after the other is not."""
    said: list[str] = []

    def other(time: float) -> None:
        try:
            with torch.no_grad():
                model(images(), at(time))
        except CacheError as error:
            said.append(str(error))

    def in_thread(time: float) -> None:
        thread = threading.Thread(target=other, args=(time,))
        thread.start()
        thread.join()

    with torch.no_grad(), sl.cached(model, every=3):
        model(images(), at(0.9))
        in_thread(0.8)
        assert len(said) == 1
        assert "two threads" in said.pop()
        model(images(), at(0.9))
        during = model.outer_up.register_forward_hook(lambda *_: in_thread(0.8))
        model(images(), at(0.8))
        during.remove()
        assert len(said) == 1
        assert "while another one runs" in said.pop()
        in_thread(0.95)
        assert not said


def test_caches_inside_of_each_other(model):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x, t):
            return self.model(x, t)

    around = Around().eval()
    with sl.cached(model), pytest.raises(CacheError, match="already"), sl.cached(around):
        pass
    with sl.cached(around), torch.no_grad():
        around(images(), at(0.9))
        with pytest.raises(CacheError, match="already"), sl.cached(model):
            pass


def test_scaling_inside_of_a_cache_is_refused(model):
    with sl.cached(model, every=2), torch.no_grad():
        sample(model, images())
        sl.scale_skips_(model, "cs", (images(), at(0.5)))
        with pytest.raises(CacheError, match=r"scaled.*leave it first"):
            sample(model, images())
    sl.unscale_(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_compiled_models_are_refused_and_compiled_blocks_work(model):
    wanted = by_hand(model, images(), 3)
    with pytest.raises(CacheError, match=r"is compiled \(it\)"):
        sl.cached(torch.compile(model, backend="eager"))  # pyright: ignore[reportArgumentType]
    whole = copy.deepcopy(model)
    whole.compile(backend="eager")
    with pytest.raises(CacheError, match=r"is compiled \(it\)"):
        sl.cached(whole)
    around: Any = torch.compile(copy.deepcopy(model), backend="eager")
    plain = sample(around, images())
    with pytest.raises(CacheError, match=r"called through torch\.compile"), sl.cached(around._orig_mod, every=3):
        sample(around, images())
    assert torch.equal(sample(around, images()), plain)
    for block in (model.first, model.middle, model.outer_up):
        block.compile(backend="eager")
    with sl.cached(model, every=3) as cache:
        torch.testing.assert_close(sample(model, images()), wanted)
        runs = model.middle.runs
        torch.testing.assert_close(sample(model, images()), wanted)
    assert cache.cached_steps == 8
    assert model.middle.runs - runs == 3


def test_what_is_not_a_model(model):
    class Pipeline:
        unet = model

    with pytest.raises(UnsupportedModelError, match=r"Pipeline: give its \.unet"):
        sl.cached(Pipeline())  # pyright: ignore[reportArgumentType]


# Schedules


def test_full_steps_are_closer_around_the_centre():
    assert sl.full_steps(12, 4, power=1) == [0, 3, 6, 9]
    found = sl.full_steps(50, 10, centre=15, power=1.4)
    assert found[0] == 0
    assert len(found) == 10
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert min(gaps) == min(gaps[2:5])
    assert gaps[-1] == max(gaps)
    for bad in ({"count": 0}, {"count": 13}, {"power": 0.5}, {"centre": 20}):
        with pytest.raises(InvalidConfigError, match="full_steps needs"):
            sl.full_steps(12, **({"count": 4} | bad))  # pyright: ignore[reportArgumentType]


# Networks of others


def test_a_text_pipeline_with_guidance():
    """Both passes of guidance in one forward, as pipelines do; a loop that keeps the main path through hooks."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            norm_num_groups=4,
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ).eval()
        scheduler = diffusers.DDIMScheduler()

    @torch.no_grad()
    def draw(split: bool) -> Tensor:
        scheduler.set_timesteps(6)
        text, null = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2)).unsqueeze(1)
        x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        for t in scheduler.timesteps:
            if split:
                a, b = (unet(x, t, encoder_hidden_states=c, return_dict=False)[0] for c in (text, null))
            else:
                both = unet(torch.cat([x, x]), t, encoder_hidden_states=torch.cat([text, null])).sample
                a, b = both.chunk(2)
            x = scheduler.step(b + 3 * (a - b), t, x).prev_sample
        return x

    with sl.cached(unet, depth=1, every=3) as cache:
        together = draw(split=False)
    assert (cache.full_steps, cache.cached_steps) == (2, 4)
    with sl.cached(unet, depth=1, every=3) as cache:
        apart = draw(split=True)
    assert (cache.full_steps, cache.cached_steps) == (4, 8)
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together, draw(split=False), atol=1e-3)


INNER = {
    "guided-diffusion": r"input_blocks\.[123]|middle|output_blocks\.[012]",
    "U-ViT, authors'": r"in_blocks\.[12]|mid_block|out_blocks\.[01]",
    "UViT": r"encoder\.[12]|middle|decoder\.[01]",
    "HunyuanDiT2DModel": r"blocks\.[1234]",
    "MONAI DiffusionModelUNet": r"down_blocks|middle_block|up_blocks\.0|up_blocks\.1\.(resnets|attentions)\.0",
}
"""What lies inside the outermost long skip, as the architectures have it."""


@pytest.mark.parametrize("name", INNER)
def test_no_layer_of_the_inner_part_runs(name):
    import families

    family = families.FAMILIES[name]
    if not families.available(family):
        pytest.skip(f"needs {family.needs}")
    model = families.build(family)
    ran: set[str] = set()
    for path, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_, path=path: ran.add(path))
    given = family.inputs(1, 1)

    def forward() -> set[str]:
        ran.clear()
        with torch.no_grad():
            families.call(model, given)
        return set(ran)

    everything = forward()
    shell = {path for path in everything if not re.match(INNER[name], path)}
    with sl.cached(model, depth=1, every=3, passes=1):
        assert [forward() for _ in range(4)] == [everything, shell, shell, everything]
