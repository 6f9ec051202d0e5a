"""A job of four workers loses one for a while, and ends with the weights of one device."""

import json
import os
import signal
import time

import keras
import pytest

import kdist
from kdist.report import read_run
from kdist.run_directory import RunDirectory, checkpoint_name
from kdist.testing import assert_same_weights
from tests.faults import elastic_program as program
from tests.forked import launched

pytestmark = pytest.mark.slow


def test_four_three_and_four_workers_equal_one_device(tmp_path, record):
    run, output, result = RunDirectory(tmp_path / "run"), tmp_path / "log", tmp_path / "weights"
    missing = tmp_path / "missing-2"

    def wait_until(condition):
        deadline = time.monotonic() + 300
        while not condition():
            assert process.exitcode is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)

    with launched(
        *("--workers=4", "--min_workers=3", "--wait_minutes=0.01", "--max_restarts=1"),
        *(f"--worker_check=! [ -e {tmp_path}/missing-$KDIST_PLACE ]", "--end_seconds=1"),
        *(f"--run_dir={run.path}", "--", program.__file__, run.checkpoints, result),
        output=output,
    ) as process:
        wait_until(lambda: len(list(tmp_path.glob(f"waits-{program.LOST}-?"))) == 4)
        before = run.checkpoints / checkpoint_name(program.LOST - 1)
        wait_until(lambda: (before / "checksums.json").exists())
        missing.touch()
        os.kill(int((tmp_path / f"waits-{program.LOST}-2").read_text()), signal.SIGKILL)
        wait_until(lambda: len(list(tmp_path.glob(f"waits-{program.BACK}-?"))) == 3)
        missing.unlink()
        process.join(300)
        assert process.exitcode == 0, output.read_text()

    keras.utils.set_random_seed(3)
    batch = kdist.Batch(program.LOCAL, program.PLANNED)
    train, _ = kdist.data.load("digits", batch=batch, examples=program.EXAMPLES)
    plain = program.compiled(keras.Model, train.image_shape, batch)
    steps = {"steps_per_epoch": train.steps_per_epoch, "epochs": program.EPOCHS}
    plain.fit(train.dataset(), **steps, shuffle=False, verbose=0)
    assert_same_weights(json.loads(result.read_text()), plain.get_weights(), 1e-5)

    messages = output.read_text()
    assert "waiting for place 2 (its check exits with 1) for up to " in messages
    assert "the job continues with 3 of 4 workers" in messages
    assert "the job restarts with 4 of 4 workers" in messages
    config = run.read_config()
    assert list(config["workers_from_step"].values()) == [4, 3, 4]
    _, lost, back = map(int, config["workers_from_step"])
    assert lost in (program.LOST - 1, program.LOST)
    assert back >= program.BACK
    recorded = read_run(run.path)
    assert f"3 of 4 workers from step {lost} to {back}" in recorded.notes
    axes = recorded.metrics("train").points("step", "examples")
    assert [list(axis) for axis in axes] == [list(range(1, 21)), list(range(32, 641, 32))]
    record(
        "kill -9 of one of four workers, whose place fails until step 14",
        "multi_worker",
        "the job continues with three workers, and grows again",
        None,
        (program.LOST - lost) * batch.global_size,
        "to 1e-5",
    )
