"""A job of four workers loses one for a while, and ends with the weights of one device."""

import json
import pathlib

import keras
import pytest

import kdist
from kdist.report import read_run
from kdist.testing import assert_same_weights
from tests.faults import elastic_program as program
from tests.faults.jobs import Run

pytestmark = pytest.mark.slow


def test_four_three_and_four_workers_equal_one_device(tmp_path):
    missing = tmp_path / "missing-2"
    flags = [
        *("--workers=4", "--min_workers=3", "--wait_minutes=0.01", "--max_restarts=1"),
        *(f"--worker_check=! [ -e {tmp_path}/missing-$KDIST_PLACE ]", "--end_seconds=1"),
    ]
    run = Run(tmp_path, "auto", flags, pathlib.Path(program.__file__)).start()
    try:
        run.wait_until(lambda: len(list(tmp_path.glob(f"waits-{program.LOST}-*"))) == 4)
        run.wait_for_checkpoint(program.LOST - 1)
        missing.touch()
        run.signal("worker 2")
        run.wait_until(lambda: len(list(tmp_path.glob(f"waits-{program.BACK}-*"))) == 3)
        lost_at = run.newest_step()
        missing.unlink()
        weights = run.wait_for_success()
    finally:
        run.stop()

    keras.utils.set_random_seed(3)
    batch = kdist.Batch(program.LOCAL, program.PLANNED)
    train, _ = kdist.data.load("digits", batch=batch, examples=program.EXAMPLES)
    plain = program.compiled(keras.Model, train.image_shape, batch)
    steps = {"steps_per_epoch": train.steps_per_epoch, "epochs": program.EPOCHS}
    plain.fit(train.dataset(), **steps, shuffle=False, verbose=0)
    assert_same_weights(weights, plain.get_weights(), 1e-5)

    output = run.output()
    assert "waiting for place 2 (its check exits with 1) for up to 1 s" in output
    assert "the job continues with 3 of 4 workers" in output
    assert "the job restarts with 4 of 4 workers" in output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert list(config["workers_from_step"].values()) == [4, 3, 4]
    _, lost, back = map(int, config["workers_from_step"])
    assert lost in (program.LOST - 1, program.LOST)
    assert back >= program.BACK > lost_at
    recorded = read_run(tmp_path / "run")
    assert f"3 of 4 workers from step {lost} to {back}" in recorded.notes
    axes = recorded.metrics("train").points("step", "examples")
    assert [list(axis) for axis in axes] == [list(range(1, 21)), list(range(32, 641, 32))]
