"""`kdist report` as a user runs it."""

import pathlib
import subprocess
import sys

from tests.unit.report.test_report import run_directory


def test_the_program(tmp_path):
    def program(*arguments):
        script = pathlib.Path(__file__).parents[2] / "scripts" / "report.py"
        command = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    page = tmp_path / "page.html"
    made = program(run_directory(tmp_path / "run"), f"--output={page}")
    assert (made.returncode, made.stdout) == (0, f"{page}\n"), made.stderr
    refused = program(tmp_path / "nowhere", f"--output={page}")
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "--run_dir of a run" in refused.stderr
    assert "--output=comparison.html" in program("--help").stdout
