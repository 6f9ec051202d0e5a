"""Stored outputs of the notebooks come from one run, and contain no log lines."""

import json
import pathlib
import re

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
# Log lines of Python, absl, kdist, and W&B; paths of the machine that ran the notebook.
_NOISE = re.compile(
    r"^(?:INFO|WARNING|ERROR|kdist|wandb|launch):.*|^[IWEF]\d{4} .*|.*(?:/tmp/|/home/|/root/).*",
    re.MULTILINE,
)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells if cell["id"] != "install"]
    assert counts == sorted(counts)
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output["text"]
        assert len(json.dumps(output)) < 500_000  # a report page has its plotting library in it
        text = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
        assert _NOISE.findall(text) == []
