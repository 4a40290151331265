"""The range of learning rates: runs, collapse, resuming, counts and words."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import scalelong as sl
import zoo
from report.made_up import made_up_range as made_up
from scalelong.errors import RunFolderError
from scalelong.stability import Method, RateRange, StepFailedError, rate_range

torch.set_num_threads(1)


class Plain(nn.Module):
    """Two long skips, read by linear layers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.middle = nn.Linear(width, width)
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        x = self.middle(x).tanh()
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1))
        return scale * x


def build(_: int) -> nn.Module:
    return Plain()


def step(model: nn.Module, _: int, source: torch.Generator) -> Tensor:
    x = torch.randn(4, 3, 4, generator=source)
    return (model(x) - x).square().mean()


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def quick(**changes) -> RateRange:
    """Too short to learn anything: what does not run away survives."""
    options = {
        "rates": (0.05, 1e6),
        "methods": ("none", "start:cs:0.7"),
        "seeds": 2,
        "steps": 8,
        "warmup": 2,
        "jobs": 1,
    }
    options |= {"optimizer": sgd, "reference_loss": 4.0}
    return rate_range(build, step, **{**options, **changes})  # type: ignore[arg-type]


def test_survivors_are_counted_and_lost_runs_end_early():
    found = quick()
    assert found.survivors("none", 0.05) == (2, 2)
    assert found.survivors("none", 1e6) == (0, 2)
    lost = found.cell("none", 1e6)
    assert {run.outcome for run in lost} <= {"collapsed", "not finite"}
    assert all(run.steps < 8 for run in lost if run.outcome == "not finite")
    assert [run.steps for run in found.cell("none", 0.05)] == [8, 8]
    half = found.half_rates[0]
    assert half.rate is not None
    assert half.rate == pytest.approx(math.sqrt(0.05 * 1e6))
    # Seeds do not vary, so the interval is what lies between the two rates.
    assert (half.low, half.high) == (0.05, 1e6)


def test_results_do_not_depend_on_the_number_of_processes_nor_on_the_global_generators():
    torch.manual_seed(1)
    one = quick(jobs=1)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    two = quick(jobs=2)

    def essence(found: RateRange) -> list[tuple[str, float, int, str, list[list[float]]]]:
        return [(run.method, run.rate, run.seed, run.outcome, run.curve) for run in found.runs]

    assert essence(one) == essence(two)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_methods_of_one_seed_share_weights_data_and_noise():
    seen: dict[str, list[Tensor]] = {}

    def watched(model: nn.Module, i: int, source: torch.Generator) -> Tensor:
        name = "started" if float(model.up[0].weight[0, 4:].detach().abs().sum()) < before else "none"  # pyright: ignore
        x = torch.randn(4, 3, 4, generator=source)
        if i == 0:
            seen.setdefault(name, []).append(torch.cat([x.flatten(), torch.rand(3)]))
        return (model(x) - x).square().mean()

    from scalelong.randomness import seed_global

    seed_global(5, "weights")
    before = float(Plain().up[0].weight[0, 4:].detach().abs().sum()) * 0.99  # pyright: ignore
    rate_range(build, watched, rates=(0.01,), methods=("none", "start:uniform:0.5"), seeds=[5], steps=4, jobs=1)
    assert torch.equal(seen["none"][-1], seen["started"][-1])


def test_a_model_is_copied_and_left_alone():
    model = Plain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = rate_range(model, step, rates=(0.01,), methods=("none", "cs", "ls"), seeds=1, steps=3, jobs=1)
    assert [run.method for run in found.runs] == ["none", "cs", "ls"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not sl.is_scaled(model)


def test_inputs_are_seen_in_the_first_step_also_by_keyword():
    def by_keyword(model: nn.Module, _: int, source: torch.Generator) -> Tensor:
        x = torch.randn(4, 3, 4, generator=source)
        return (model(x, scale=1.0) - x).square().mean()

    found = rate_range(build, by_keyword, rates=(0.01,), methods=("none", "cs"), seeds=1, steps=3, jobs=1)
    assert len(found.runs) == 2


def test_functions_and_other_networks_are_methods():
    def zero(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()

    methods = (Method("none"), Method("zero", zero), Method("wide", build=lambda _: Plain(4).double().float()))
    found = quick(methods=methods, rates=(0.05,), seeds=1)
    assert found.methods == ("none", "zero", "wide")
    # All biases and weights are zero, so that nothing but the last bias learns.
    assert found.cell("zero", 0.05)[0].curve[0] != found.cell("none", 0.05)[0].curve[0]
    assert found.cell("wide", 0.05)[0].curve == found.cell("none", 0.05)[0].curve


def test_the_same_call_continues_and_other_settings_are_refused_by_name(tmp_path, caplog):
    caplog.set_level("INFO")
    first = quick(out=tmp_path, seeds=1)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 4
    # A crash cut off the last line.
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    caplog.clear()
    again = quick(out=tmp_path, seeds=1)
    assert [message[:3] for message in caplog.messages] == ["4/4"]
    assert [run.curve for run in again.runs] == [run.curve for run in first.runs]
    # Someone edited a line.
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines[:3], lines[3].replace('"rate": ', '"rate": "x')]) + "\n")
    with pytest.raises(RunFolderError, match="remove that line"):
        quick(out=tmp_path, seeds=1)
    (tmp_path / "runs.jsonl").write_text("\n".join(lines) + "\n")
    more = quick(out=tmp_path, seeds=2, rates=(0.05, 0.1, 1e6), methods=("none", "start:cs:0.7", "cs"))
    assert len(more.runs) == 18
    with pytest.raises(RunFolderError, match="steps was 8 and is 9"):
        quick(out=tmp_path, steps=9)
    with pytest.raises(RunFolderError, match=r"weights\.none was"):
        rate_range(
            lambda _: Plain(6),
            lambda model, _, source: model(torch.randn(2, 3, 6, generator=source)).square().mean(),
            rates=(0.05,),
            methods=("none",),
            seeds=1,
            steps=8,
            warmup=2,
            reference_loss=first.reference_loss,
            jobs=1,
            out=tmp_path,
        )
    with pytest.raises(RunFolderError, match=r"about.data was None and is 'x'"):
        quick(out=tmp_path, about={"data": "x"})
    saved = RateRange.from_json((tmp_path / "range.json").read_text())
    assert saved.verdict == more.verdict
    assert (tmp_path / "range.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rates": ()}, "at least one of rates"),
        ({"rates": (0.1, -1)}, "rates must be above 0, got -1"),
        ({"rates": (0.1, 0.1)}, "each once"),
        ({"rates": (math.nan,)}, "rates must be above 0"),
        ({"seeds": 0}, "seeds must be a whole number"),
        ({"seeds": [1, 1]}, "each once"),
        ({"methods": ()}, "at least one of methods"),
        ({"methods": ("none", "nosuch")}, "unknown scaling method 'nosuch'"),
        ({"methods": ("none", "start:none")}, "starts nothing"),
        ({"steps": 1}, "steps must be"),
        ({"warmup": 8}, "leaves nothing"),
        ({"jobs": 0}, "jobs must be"),
        ({"your_rate": 0.0}, "your_rate must be above 0"),
        ({"reference_loss": -1.0}, "reference_loss must be above 0"),
    ],
)
def test_bad_input_is_named_before_any_work(changes, words, tmp_path):
    def never(model: nn.Module, i: int, source: torch.Generator) -> Tensor:
        raise AssertionError("a step was taken")

    options = {"rates": (0.05,), "methods": ("none",), "seeds": 1, "steps": 8, "jobs": 1, **changes}
    with pytest.raises(sl.InvalidConfigError, match=words):
        rate_range(build, never, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_models_without_long_skips_can_be_ranged_but_not_scaled():
    options = {"rates": (0.05,), "seeds": 1, "steps": 4, "jobs": 1}
    assert len(rate_range(lambda _: nn.Linear(4, 4), step, methods=("none",), **options).runs) == 1
    with pytest.raises(sl.UnfoldableSkipsError, match="needs constants"):
        quick(methods=("none", "start:ls"))
    with pytest.raises(sl.NoLongSkipsError):
        rate_range(lambda _: nn.Linear(4, 4), step, methods=("none", "cs"), **options)


@pytest.mark.parametrize(
    ("loss", "words"),
    [(lambda x: 1.0, "float"), (lambda x: x, "shape"), (lambda x: x.mean().detach(), "a gradient")],
)
def test_what_is_not_a_loss_is_refused(loss, words):
    with pytest.raises(sl.InvalidConfigError, match=words):
        rate_range(build, lambda m, i, g: loss(m(torch.randn(1, 2, 4))), rates=(1.0,), seeds=1, steps=4)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_step_that_raises_is_named_and_what_was_done_is_kept(jobs, tmp_path):
    def fails(model: nn.Module, i: int, source: torch.Generator) -> Tensor:
        if i == 5 and source.initial_seed() == bad:
            raise KeyError("no such image")
        return step(model, i, source)

    from scalelong.randomness import generator

    bad = generator(1, "range", 5).initial_seed()
    with pytest.raises(StepFailedError, match=r"none at 5e-2, seed 1 failed(.|\n)*no such image"):
        rate_range(build, fails, rates=(0.05,), methods=("none",), seeds=2, steps=8, jobs=jobs, out=tmp_path)


def surviving_below(edge: float, **otherwise):
    """Runs that are not trained: those below a rate survive."""

    def run_all(_, waiting, __):
        for method, rate, seed in waiting:
            made = made_up({method: {rate: int(rate < edge)}}, seeds=1).runs[0]
            yield replace(made, seed=seed, **({} if made.survived else otherwise))

    return run_all


@pytest.mark.parametrize(
    ("edge", "lowest"),
    [(5e-3, 4e-3), (9e-3, 8e-3), (1e-3, 5e-4), (3e-3, 2e-3), (math.inf, 1.024), (0.0, 2e-3 / 4**4)],
)
def test_rates_that_are_not_given_are_found(edge, lowest):
    """The highest that the baseline survives, and two and four times that."""
    for otherwise in ({}, {"outcome": "not learned", "steps": 5}):  # ended, because it had lost what little it knew
        found = quick(rates=None, seeds=1, run_all=surviving_below(edge, **otherwise))
        assert found.rates == pytest.approx([lowest, 2 * lowest, 4 * lowest])
        assert len(found.runs) == 6


def test_a_run_that_loses_the_little_it_had_learned_is_ended_and_has_not_learned():
    losses = [1.0] * 10 + [0.85] * 40 + [1.0] * 200

    def replayed(model: nn.Module, i: int, _: torch.Generator) -> Tensor:
        return losses[i] + 0 * torch.stack([parameter.sum() for parameter in model.parameters()]).sum()

    options = {"methods": ("none",), "seeds": 1, "steps": 250, "warmup": 5, "reference_loss": 1.0}
    (run,) = rate_range(build, replayed, rates=(1e-9,), **options, jobs=1).runs
    assert (run.outcome, run.onset) == ("not learned", None)
    assert run.steps < 150


# Counts and words, on made-up runs


def test_the_rate_that_half_survive_is_interpolated_and_has_an_interval():
    found = made_up({"none": {4e-3: 8, 8e-3: 1, 16e-3: 0}, "cs": {4e-3: 8, 8e-3: 8, 16e-3: 4}})
    none, cs = found.half_rates
    assert none.rate == pytest.approx(4e-3 * 2 ** (0.5 / (1 - 1 / 8)))
    assert 4e-3 <= (none.low or 0) <= (none.rate or 0) <= (none.high or 1) < 8e-3
    assert cs.rate == pytest.approx(16e-3)
    assert cs.high is None  # among drawn seeds, more than half often survive the largest rate


def test_shares_are_made_monotone():
    found = made_up({"none": {1e-3: 6, 2e-3: 8, 4e-3: 2}})
    assert found.half_rates[0].rate == pytest.approx(2e-3 * 2 ** ((7 / 8 - 0.5) / (7 / 8 - 2 / 8)))


def test_runs_at_rates_too_low_to_learn_are_not_collapses():
    found = made_up({"none": {1e-5: 8, 4e-3: 8, 8e-3: 0}})
    slow = [run if run.rate > 1e-5 else replace(run, outcome="not learned") for run in found.runs]
    slower = replace(found, runs=tuple(slow))
    assert slower.survivors("none", 1e-5) == (0, 8)
    assert slower.half_rates[0].rate == found.half_rates[0].rate


def test_the_verdict_names_a_difference_and_what_to_do():
    found = made_up(
        {
            "none": {4e-3: 8, 8e-3: 1, 12e-3: 0},
            "merge_norm": {4e-3: 8, 8e-3: 7, 12e-3: 5},
            "ls": {4e-3: 8, 8e-3: 1, 12e-3: 1},
        },
        your_rate=1e-4,
    )
    assert found.differences[0].differs
    assert not found.differences[1].differs
    assert found.verdict == (
        "Half of the runs survive: above 1.2e-2 with merge_norm, 5.9e-3 with none. "
        'Call sl.scale_skips_(model, "merge_norm", inputs) before the first step, or stay at 4e-3 or below, where all '
        "survive without it. No difference that 8 seeds can show with ls. "
        "Survivors: none 9 of 24; merge_norm 20 of 24; ls 10 of 24. "
        "At your rate of 1e-4 (and at 4e-3) nothing differs: all runs survive."
    )
    assert "block decoder.3 (15 of 15)" in str(found)
    pytest.importorskip("matplotlib")
    figure = found.plot()
    figure.canvas.draw()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        assert sum(bool(label.get_text()) for label in axis.get_ticklabels()) >= 2


MORE = "At a rate of 8e-3 more runs survive with"
VERDICTS = [
    ({"none": {4e-3: 8, 8e-3: 8}, "cs": {4e-3: 8, 8e-3: 8}}, 8, "All of them up to 8e-3: higher rates may show one."),
    ({"none": {8e-3: 3}, "cs": {8e-3: 5}}, 8, "No difference that 8 seeds can show: none 3 of 8; cs 5 of 8"),
    ({"none": {8e-3: 0}, "cs": {8e-3: 1}}, 1, "Cannot be judged with one seed: 6 or more"),
    ({"none": {8e-3: 8}, "cs": {8e-3: 0}}, 8, "Fewer survive with cs than with none."),
    ({"none": {4e-3: 0, 8e-3: 0}, "cs": {4e-3: 8, 8e-3: 8}}, 8, "above 8e-3 with cs, below 4e-3 with none"),
    ({"none": {8e-3: 0}, "start:cs": {8e-3: 8}}, 8, f"{MORE} start:cs than with none. That delays a collapse"),
    # What lasts is advised, unless another method has more survivors than chance explains.
    ({"none": {8e-3: 0}, "merge_norm": {8e-3: 6}, "start:cs": {8e-3: 8}}, 8, f"{MORE} merge_norm than with none. Call"),
    (
        {"none": {8e-3: 0, 9e-3: 0}, "merge_norm": {8e-3: 8, 9e-3: 0}, "norms": {8e-3: 8, 9e-3: 8}},
        8,
        "with norms, below 8e-3 with none.",
    ),
]


@pytest.mark.parametrize(("survivors", "seeds", "words"), VERDICTS)
def test_the_verdict_follows_from_the_counts(survivors, seeds, words):
    assert words in made_up(survivors, seeds=seeds).verdict


def test_p_values_are_exact_and_corrected():
    """Eight pairs of one sign: 2 / 2^8, times two methods for the smaller of two (Holm)."""
    found = made_up({"none": {8e-3: 0}, "cs": {8e-3: 8}, "ls": {8e-3: 0}})
    assert [entry.p for entry in found.differences] == [2 / 2**8 * 2, 1.0]


def test_json_round_trip_and_bad_json():
    found = made_up({"none": {4e-3: 8, 8e-3: 1}, "cs": {4e-3: 8, 8e-3: 8}}, title="A title", your_rate=1e-3)
    again = RateRange.from_json(found.to_json())
    assert again == found
    assert str(again) == str(found)
    good = json.loads(found.to_json())
    surplus = json.dumps({**good, "runs": [{**good["runs"][0], "surplus": 1}]})
    for text in ("{}", "[]", "[" * 100_000, surplus, json.dumps({**good, "seeds": None})):
        with pytest.raises(sl.InvalidConfigError, match=r"not a range\.json.*make it again"):
            RateRange.from_json(text)


def test_methods_that_a_network_refuses_are_left_out_of_the_usual_ones(caplog):
    def step(model: nn.Module, _: int, draws: torch.Generator) -> Tensor:
        return model(torch.randn(2, 3, 16, 16, generator=draws)).square().mean()

    found = sl.rate_range(lambda _: zoo.Additive(), step, rates=(1e-3,), seeds=1, steps=4, jobs=1)
    assert "merge_norm" not in found.methods
    assert found.methods[0] == "none"
    assert "without merge_norm" in caplog.text
    with pytest.raises(sl.UnsupportedModelError):
        sl.rate_range(
            lambda _: zoo.Additive(), step, rates=(1e-3,), methods=("none", "merge_norm"), seeds=1, steps=4, jobs=1
        )
