"""Where a network errs, of a run whose answers are known."""

from dataclasses import replace

from research.starts import error_row, main
from scalelong.runs import recipe
from scalelong.training import train


def run(folder, **changes):
    base = recipe("digits-tiny")
    config = replace(
        base,
        steps=1,
        batch_size=8,
        model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
        images=replace(base.images, held_out=64),
        diffusion=replace(base.diffusion, prediction="epsilon"),
        optimizer=replace(base.optimizer, lr=0.0),
        logging=replace(base.logging, samples_every=0, trackers=()),
    )
    train(replace(config, **changes), folder)
    return folder


def test_a_network_that_learned_nothing_errs_by_the_noise(tmp_path):
    row = error_row(run(tmp_path / "run"))
    # What it predicts has no relation to ε, so that the error is the variance of ε and that of the output: 1 each.
    errors = [float(row[f"error, quarter {i} of the times"]) for i in (1, 2, 3, 4)]
    assert all(1.5 < value < 2.7 for value in errors), errors
    assert row["gains of the last convolution"] == "1.00 to 1.00"
    assert row["correlation of gain and error"] == "-"


def test_the_gains_are_those_of_the_kernel(tmp_path):
    folder = run(tmp_path / "run", model_options={"patch_size": 4, "dim": 16, "depth": 2, "final_start": "authors"})
    smallest, largest = map(float, error_row(folder)["gains of the last convolution"].split(" to "))
    assert smallest < 0.5 * largest
    assert -1 <= float(error_row(folder)["correlation of gain and error"]) <= 1


def test_other_networks_are_refused_in_one_line(tmp_path, capsys):
    assert (
        main(["errors", str(run(tmp_path / "run", diffusion=replace(recipe("digits-tiny").diffusion, prediction="v")))])
        == 1
    )
    assert "is not a U-ViT that predicts ε and ends in a convolution" in capsys.readouterr().err
    assert main(["errors", str(run(tmp_path / "good"))]) == 0
    assert "quarter 4" in capsys.readouterr().out
