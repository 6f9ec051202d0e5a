import json
import os
import subprocess
import sys

from kdist.telemetry import JsonlWriter

# A limit of a file's size stands for a full disk: the write that reaches it is cut short.
FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from kdist.telemetry import JsonlWriter
writer = JsonlWriter(sys.argv[1])
for step in range(300):
    writer.write({"step": step})
writer.close()
"""


def test_a_full_disk_leaves_complete_lines_and_is_logged_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    process = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stderr.count("kdist:") == 1
    assert "cannot write metrics" in process.stderr
    lines = path.read_text().splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    assert [json.loads(line) for line in lines] == [{"step": n} for n in range(len(lines))]
    assert path.stat().st_size > 980  # it did fill


def test_a_missing_directory_is_logged_once(tmp_path, capsys):
    writer = JsonlWriter(tmp_path / "away" / "metrics.jsonl")
    writer.write({"step": 1})
    writer.write({"step": 2})
    assert capsys.readouterr().err.count("cannot write metrics") == 1


def test_lines_are_appended_to_an_existing_file(tmp_path):
    for step in (1, 2):
        writer = JsonlWriter(tmp_path / "metrics.jsonl")
        writer.write({"step": step})
        writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_file_mode_follows_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        JsonlWriter(tmp_path / "metrics.jsonl").write({"step": 1})
    finally:
        os.umask(before)
    assert (tmp_path / "metrics.jsonl").stat().st_mode & 0o777 == 0o644
