"""Data workers that the launcher starts for a job."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

# Writes the batches that data workers prepare, and those of this process alone.
PROGRAM = """
import json, pathlib, sys
import numpy as np
import kdist

def batches(**options):
    train, _ = kdist.data.load(
        sys.argv[1], batch=kdist.Batch(4), operations="resize(8, 8)|random_flip()", cache=False,
        **options,
    )
    dataset = train.dataset().take(2 * train.steps_per_epoch)
    return train, [(x.numpy().tolist(), y.numpy().tolist()) for x, y in dataset]

train, prepared = batches()
_, alone = batches(data_workers=())
print(json.dumps({"workers": len(train._data_workers), "same": prepared == alone}))
"""


@pytest.mark.slow
def test_the_launcher_starts_and_ends_data_workers(scripts, tmp_path):
    generator = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "images" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9 + number % 3, 8, 3), "uint8")).save(path)
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.run(
        [
            *(sys.executable, scripts / "launch.py", "--data_workers=2", "--run_dir=run"),
            *("--timeout_seconds=240", "--", "program.py", "images"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:] + process.stdout[-3000:]
    line = next(line for line in process.stdout.splitlines() if "same" in line)
    assert json.loads(line.partition("] ")[2]) == {"workers": 2, "same": True}
    for number in range(2):
        assert "Data worker at" in (tmp_path / f"run/logs/data-worker-{number}.log").read_text()
