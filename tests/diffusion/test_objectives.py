"""Every objective on Gaussian data, whose best network has a closed form; flows and EDM against their papers."""

# pyright: reportArgumentType=false

import json
import math

import pytest
import torch

from scalelong.config import (
    DiffusionConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainConfig,
    samplers_of,
)
from scalelong.diffusion import sample
from scalelong.errors import InvalidConfigError
from scalelong.noise import SIGMA_DATA, NoiseProcess, alpha_bars, even_fractions, target
from scalelong.runs import load_run
from scalelong.training import read_metrics, train

MEAN, SPREAD, COUNT = 0.3, 0.4, 3000
PAIRS = [("flow", "flow"), ("flow-logit", "flow"), ("edm", "edm"), ("vp", "epsilon"), ("ddpm", "x0"), ("cosine", "v")]
STOCHASTIC = ("ddpm", "sde")


def exact(process, prediction):
    """The best network for x_0 ~ N(m, s²): the target with E[x_0 | x_t] and E[ε | x_t] in it."""

    def predict(x, t):
        signal, sigma = (value.view(-1, *[1] * (x.dim() - 1)).double() for value in process.signal_and_noise(t))
        off = (x.double() - signal * MEAN) / (signal**2 * SPREAD**2 + sigma**2)
        x0, noise = MEAN + signal * SPREAD**2 * off, sigma * off
        return target(process, prediction, x0, noise, t).float()

    return predict


def cases():
    return [(s, p, sampler) for s, p in PAIRS for sampler in samplers_of(s) if sampler not in STOCHASTIC]


@pytest.mark.parametrize(("schedule", "prediction", "sampler"), cases())
def test_samplers_end_in_the_data(schedule, prediction, sampler):
    process = NoiseProcess(schedule)
    options, before = {"sampler": sampler, "steps": 100, "clip": False}, torch.get_rng_state()
    found = sample(exact(process, prediction), process, prediction, (1, 1, COUNT), [0], **options).flatten()
    assert torch.equal(before, torch.get_rng_state())
    assert abs(float(found.mean()) - MEAN) < 0.03
    assert abs(float(found.std()) - SPREAD) < 0.03
    clipped = sample(exact(process, prediction), process, prediction, (1, 1, 64), [0], sampler=sampler, steps=10)
    assert float(clipped.abs().max()) <= 1


def test_flow_by_heun_is_the_closed_form():
    """The flow's ODE keeps quantiles: x_0 = m + s ε for the noise ε that it began with."""
    process = NoiseProcess("flow")
    found = sample(exact(process, "flow"), process, "flow", (1, 1, 50), [3], sampler="heun", steps=200, clip=False)
    began = torch.randn(1, 1, 50, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found[0], MEAN + SPREAD * began, rtol=0, atol=0.01)


def test_edm_is_the_papers_table():
    """Karras et al. (2022), Table 1: c_skip, c_out, c_in; the network's time is linear in c_noise = log(σ) / 4."""
    process, x0, noise = NoiseProcess("edm"), torch.randn(5, 3), torch.randn(5, 3)
    t = process.times(torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))
    sigma = process.edm_sigma(t)[:, None].float()
    x, total = x0 + sigma * noise, sigma**2 + SIGMA_DATA**2
    torch.testing.assert_close(process.add_noise(x0, noise, t), x / total.sqrt())
    wanted = (x0 - SIGMA_DATA**2 / total * x) / (sigma * SIGMA_DATA / total.sqrt())
    torch.testing.assert_close(target(process, "edm", x0, noise, t), wanted, rtol=1e-4, atol=1e-4)
    scale, shift = process.time_map
    torch.testing.assert_close((scale * sigma[:, 0].log() / 4 + shift), t, rtol=1e-4, atol=1e-2)
    # Half of the levels are below exp(-1.2).
    assert float(sigma[2]) == pytest.approx(math.exp(-1.2), rel=1e-5)


def test_times_of_flows():
    uniform, logit = (NoiseProcess(name).times(even_fractions(10_001)) / 999 for name in ("flow", "flow-logit"))
    assert float(uniform.mean()) == pytest.approx(0.5, abs=1e-3)
    assert float(uniform.min()) > 0
    assert float(uniform.max()) <= 1
    # Logit-normal: a quarter lies below sigmoid(-0.6745).
    assert float(logit.quantile(0.25)) == pytest.approx(1 / (1 + math.exp(0.6745)), abs=1e-3)
    for process in map(NoiseProcess, ("flow", "flow-logit", "edm")):
        times = process.times(torch.tensor([0.0, 0.5, 1 - 1e-7]))
        assert bool(((times >= 0) & (times <= 999)).all())
        bars = alpha_bars(process.schedule)
        assert bool(((bars >= 0) & (bars <= 1)).all())


def test_what_does_not_go_together_is_refused():
    for values, said in (
        ({"schedule": "flow"}, "`prediction` flow"),
        ({"schedule": "edm", "prediction": "v"}, "`prediction` edm"),
        ({"prediction": "flow"}, "flow goes with flow and flow-logit"),
        ({"schedule": "ddpm", "prediction": "edm"}, "edm with edm"),
    ):
        with pytest.raises(InvalidConfigError, match=said):
            DiffusionConfig(**values)
    flow = DiffusionConfig(schedule="flow", prediction="flow")
    with pytest.raises(InvalidConfigError, match="`sampler` euler or heun or dpm"):
        TrainConfig(diffusion=flow, logging=LoggingConfig(sampler="sde"))
    with pytest.raises(InvalidConfigError, match="not made for the schedule 'edm'"):
        sample(lambda x, _: x, NoiseProcess("edm"), "edm", (1, 2, 2), [0], sampler="heun")
    with pytest.raises(InvalidConfigError, match="has no β_t"):
        _ = NoiseProcess("flow").betas


@pytest.mark.parametrize(("schedule", "prediction"), [("flow", "flow"), ("edm", "edm")])
def test_a_run_learns_and_is_used(schedule, prediction, tmp_path):
    config = TrainConfig(
        data="digits",
        model_options={"patch_size": 4, "dim": 32, "depth": 2, "heads": 2},
        scaling="cs",
        steps=150,
        batch_size=16,
        images=ImagesConfig(held_out=100),
        diffusion=DiffusionConfig(schedule=schedule, prediction=prediction),
        optimizer=OptimizerConfig(lr=5e-3, warmup=10, clip=1.0),
        hardware=HardwareConfig(precision="fp32"),  # not what a measurement of this moment prefers
        logging=LoggingConfig(log_every=50, trackers=(), samples=4, sampler_steps=4, held_out_every=5, monitor_every=0),
    )
    train(config, tmp_path / "run", quiet=True)
    losses = [line["held_out_loss"] for line in read_metrics(tmp_path / "run") if "held_out_loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    run = load_run(tmp_path / "run")
    images = run.sample(2, sampler="euler", steps=8)
    assert images.float().std() > 10
    # What the exported pipeline must know: another time than its scheduler's.
    from scalelong.experiments import diagnose_run
    from scalelong.export import export_run

    folder = export_run(run, tmp_path / "export")
    index = json.loads((folder / "model_index.json").read_text())
    assert (index["time_scale"], index["time_shift"]) == run.process.time_map
    assert "DPMSolverMultistep" in index["scheduler"][1]
    assert diagnose_run(run).recommendation in ("none", "merge_norm")
    with pytest.raises(InvalidConfigError, match="`sampler`"):
        run.sample(1, sampler="ddim")
