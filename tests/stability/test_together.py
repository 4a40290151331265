"""Runs of a range that are trained together, against the same runs one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl
from scalelong.errors import InvalidConfigError
from scalelong.stability import DenoisingStep, Method, RateRange, RateRun, StepFailedError, rate_range
from scalelong.stability.range import Watch, adamw
from scalelong.stability.together import clip_each_, shape_of_runs, stack_of, stack_size, train_together

torch.set_num_threads(1)


def build(_: int) -> sl.UViT:
    return sl.UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=4, heads=2, init_std=0.1)


def prepare(_: int, source: torch.Generator):
    x = torch.randn(4, 1, 8, 8, generator=source)
    t = 999 * torch.rand(4, generator=source)
    return (x, t, None), lambda output: (output - x).square().mean()


def found(**changes: Any) -> RateRange:
    options = {"rates": (3e-3, 0.5), "methods": ("none", "start:cs:0.7", "cs:0.7"), "seeds": 2, "steps": 24}
    options |= {"warmup": 4, "jobs": 1, "say": None}
    return rate_range(build, DenoisingStep(prepare), **{**options, **changes})  # type: ignore[arg-type]


def require_same(mine: RateRun, theirs: RateRun) -> None:
    """The end of a run that goes well, and the beginning of one that goes wild: there rounding soon decides."""
    assert (mine.method, mine.rate, mine.seed) == (theirs.method, theirs.rate, theirs.seed)
    assert mine.survived == theirs.survived
    some = slice(None) if mine.rate < 0.1 else slice(6)
    assert [value for _, value in mine.curve][some] == pytest.approx([v for _, v in theirs.curve][some], rel=1e-3)
    if mine.rate < 0.1:
        assert (mine.outcome, mine.steps, mine.best_step) == (theirs.outcome, theirs.steps, theirs.best_step)


@pytest.fixture(scope="module")
def one_by_one() -> RateRange:
    return found(stack=1)


def test_runs_end_as_they_do_alone(one_by_one):
    together = found()
    assert [run.stack for run in one_by_one.runs] == [1] * 12
    assert {run.stack for run in together.runs} == {6}  # all of a rate
    outcomes = [run.outcome for run in together.runs]
    assert len({run.steps for run in together.runs}) > 2, f"some should end before the others: {outcomes}"
    for mine, theirs in zip(together.runs, one_by_one.runs, strict=True):
        require_same(mine, theirs)


def test_results_do_not_depend_on_processes_or_on_what_is_finished_already(tmp_path, one_by_one):
    first = found(jobs=2, stack=3, seeds=1, out=tmp_path)
    assert {run.stack for run in first.runs} == {3}
    more = found(jobs=2, stack=4, out=tmp_path)  # seed 1 is new
    for mine, theirs in zip(more.runs, one_by_one.runs, strict=True):
        require_same(mine, theirs)
    assert '"stack": 3' in (tmp_path / "runs.jsonl").read_text()


def test_clipping_is_that_of_each_run():
    alone = found(stack=1, clip=0.05, rates=(3e-3,), methods=("none", "cs:0.7"))
    together = found(clip=0.05, rates=(3e-3,), methods=("none", "cs:0.7"))
    assert {run.stack for run in together.runs} == {4}
    for mine, theirs in zip(together.runs, alone.runs, strict=True):
        assert mine.last == pytest.approx(theirs.last, rel=1e-3)
    stacked = [nn.Parameter(torch.zeros(3, 2, 2)), nn.Parameter(torch.zeros(3))]
    for parameter, gradient in zip(stacked, (torch.randn(3, 2, 2), torch.randn(3)), strict=True):
        parameter.grad = gradient * torch.tensor([0.01, 1.0, 100.0]).view(-1, *[1] * (gradient.dim() - 1))
    kept = [parameter.grad.clone() for parameter in stacked if parameter.grad is not None]
    clip_each_(stacked, 0.5)
    for place in range(3):
        own = [nn.Parameter(torch.zeros_like(gradient[place])) for gradient in kept]
        for parameter, gradient in zip(own, kept, strict=True):
            parameter.grad = gradient[place].clone()
        nn.utils.clip_grad_norm_(own, 0.5)
        for mine, theirs in zip(stacked, own, strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad[place], theirs.grad)


def test_models_are_handed_over_with_the_weights_that_they_ended_with():
    sums: dict[int, list[tuple[Any, ...]]] = {1: [], 8: []}
    for stack, seen in sums.items():

        def note(model: nn.Module, run: RateRun, seen=seen) -> None:
            seen.append((run.method, run.rate, run.seed, sum(float(p.detach().sum()) for p in model.parameters())))

        found(stack=stack, after=note, seeds=1)
    assert [entry[:3] for entry in sorted(sums[8])] == [entry[:3] for entry in sorted(sums[1])]
    for mine, theirs in zip(sorted(sums[8]), sorted(sums[1]), strict=True):
        assert mine[3] == pytest.approx(theirs[3], rel=0.01, abs=0.05)


@pytest.mark.parametrize("merge_norm", [False, True])
def test_sizes_of_blocks_and_skips_are_those_that_hooks_read(merge_norm):
    def built(seed: int) -> sl.UViT:
        torch.manual_seed(seed)
        return sl.UViT(**WIDER, merge_norm=merge_norm).train()

    step = DenoisingStep(prepare)
    models, source = [built(seed) for seed in range(2)], torch.Generator
    plan = sl.find_skips(models[0], prepare(0, source())[0][:2])
    inputs = [prepare(0, source().manual_seed(seed)) for seed in range(2)]
    stack = stack_of(models, [given for given, _ in inputs])
    assert stack is not None
    readings, _ = train_together(
        stack,
        models,
        [plan] * 2,
        [0, 1],
        lambda _, seed: inputs[seed],
        lambda p: adamw(p, 1e-3),
        [1.0],
        None,
        [never] * 2,
    )
    for seed in range(2):
        model = built(seed)
        with Watch(model, plan) as watch:
            watch.listen(0)
            step(model, 0, source().manual_seed(seed))
            watch.read(0)
        assert readings[seed][0][1] == pytest.approx(watch.readings[0][1], rel=1e-4)


def never(_: int, __: float) -> bool:
    return False


def by_shape(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() < 2]}]
    return torch.optim.AdamW(groups, lr=rate)


def hooked(model: nn.Module) -> None:
    model.get_submodule("middle").register_forward_hook(lambda *_: None)


def plain(model: nn.Module, i: int, source: torch.Generator) -> Tensor:
    return DenoisingStep(prepare)(model, i, source)


def test_what_cannot_be_stacked_is_trained_one_by_one():
    short = {"steps": 3, "warmup": 1, "rates": (1e-3,)}
    methods = ("none", Method("hooked", hooked), "ls", Method("wider", "none", lambda _: sl.UViT(**WIDER)))
    mixed = found(methods=methods, **short)
    assert {run.method: run.stack for run in mixed.runs} == {"none": 2, "hooked": 1, "ls": 1, "wider": 2}
    assert {run.stack for run in found(optimizer=by_shape, **short).runs} == {1}
    alone = rate_range(build, plain, methods=("none",), seeds=2, jobs=1, say=None, **short)  # type: ignore[arg-type]
    assert {run.stack for run in alone.runs} == {1}
    # Parts that were exchanged for others of the same kind show in the answer.
    models, inputs = [build(0), build(1)], [prepare(0, torch.Generator())[0]] * 2
    assert stack_of(models, inputs) is not None
    models[1].encoder[0].attention.heads = 4  # type: ignore[union-attr]
    assert stack_of(models, inputs) is None
    # A network that is another one for another seed is noticed when it is built.
    sizes = (8, 16)
    changing = rate_range(
        lambda seed: sl.UViT(**{**WIDER, "dim": sizes[seed]}),
        DenoisingStep(prepare),
        methods=("none",),
        seeds=2,
        jobs=1,
        say=None,
        **short,  # type: ignore[arg-type]
    )
    assert {run.stack for run in changing.runs} == {1}


WIDER: dict[str, Any] = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 24, "depth": 2, "heads": 2}


def test_size_alone_decides_how_many_go_at_once():
    small, large = (shape_of_runs(build(0), prepared(batch), adamw) for batch in (4, 256))
    assert small is not None
    assert large is not None
    assert (stack_size(small), stack_size(large)) == (6, 1)


def prepared(batch: int) -> tuple[Tensor, Tensor, None]:
    return torch.zeros(batch, 1, 8, 8), torch.zeros(batch), None


def test_what_fails_is_named():
    def fails(i: int, source: torch.Generator):
        if i == 4:
            raise KeyError("no such image")
        return prepare(i, source)

    with pytest.raises(
        StepFailedError, match=r"none at 1e-3, seed 0, or one of 1 runs beside it failed.*no such image"
    ):
        rate_range(build, DenoisingStep(fails), rates=(1e-3,), methods=("none",), seeds=2, steps=6, jobs=1, say=None)
    with pytest.raises(InvalidConfigError, match="stack must be a whole number"):
        found(stack=0)
