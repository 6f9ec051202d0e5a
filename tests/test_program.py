"""Programs: grouped help, exit codes, and errors of one line."""

import functools
import os
import re
import subprocess
import sys

import pytest
from absl import flags

from kdist import program
from kdist.commands import command_line
from kdist.commands.command_line import COMMANDS

PROGRAM = '''"""Copies a file.

  python copy_file.py --source=a
"""
from absl import flags
from kdist import program
from kdist.commands.command_line import COMMANDS

with program.flag_group("Common"):
    flags.DEFINE_string("source", None, "File to copy, such as a…")
with program.flag_group("Advanced"):
    flags.DEFINE_boolean("flush", False, "Flush the disk cache.")
    flags.DEFINE_enum("mode", "fast", ["fast", "safe"], "Copy mode.")
flags.DEFINE_integer("level", 3, "Compression level.")
flags.DEFINE_float("seconds", 1.0, "Time limit.")
flags.DEFINE_list("folders", [], "Directories.")
with program.flag_group("Common"):
    flags.DEFINE_boolean("atomic", True, "Rename at the end.")


def main(_):
    raise {"value": ValueError("no such file"), "key": KeyError("defect"),
           "memory": MemoryError("Unable to allocate 9 TiB"),
           "device": type("ResourceExhaustedError", (Exception,), {})("OOM\\nDetails"),
           "full": OSError(28, "No space left on device"),
           "missing": FileNotFoundError(2, "No such file or directory", "models/a"),
           "full_checkpoint": type("ResourceExhaustedError", (Exception,), {})(
               "{{function_node __wrapped__SaveV2}} a/part-0; No space left on device"),
           "peer": type("DeadlineExceededError", (Exception,), {})("A\\nB is aborted by: C\\nD"),
           "interrupt": KeyboardInterrupt()}[flags.FLAGS.source]


if __name__ == "__main__":
    program.run(main)
'''


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs the program above and returns the process."""
    path = tmp_path / "copy_file.py"
    path.write_text(PROGRAM)

    def run_program(*arguments):
        command = [sys.executable, str(path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run_program


@pytest.mark.parametrize("flag", ["--help", "--helpshort", "-?", "-h"])
def test_help_groups_flags_and_exits_with_0(run, flag):
    process = run(flag)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(
        "Copies a file.\n\n  python copy_file.py --source=a\n\nCommon:\n"
    )
    order = ["Common:", "--source:", "--[no]atomic:", "Advanced:", "--[no]flush:", "--mode:"]
    places = [process.stdout.index(text) for text in [*order, "Other:", "--level:"]]
    assert places == sorted(places)
    assert "--mode: <fast|safe>: Copy mode. (default: fast)" in process.stdout
    assert "--[no]flush: Flush the disk cache.\n" in process.stdout
    assert "--undefok" not in process.stdout  # a flag of absl itself


def test_help_is_readable_in_any_encoding(run, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = run("--help")
    assert process.returncode == 0, process.stderr
    assert r"File to copy, such as a\u2026" in process.stdout


def test_full_help_lists_flags_of_libraries(run):
    process = run("--helpfull")
    assert process.returncode == 0, process.stderr
    assert "--source" in process.stdout
    assert "--undefok" in process.stdout


def test_user_errors_are_one_line(run):
    process = run("--source=value")
    assert (process.returncode, process.stderr) == (1, "copy_file.py: no such file\n")
    assert run("stray").stderr.startswith("copy_file.py: unknown argument 'stray'")


def objection(define, text):
    """Returns the objection to the value of a flag."""
    values = flags.FlagValues()
    define(flag_values=values)
    (name,) = values
    values[name].parse(text)
    return program.objection(values[name])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(("seconds", text, "finite number") for text in ("nan", "inf", "-inf", "1e999")),
        ("end_seconds", "-1", "0 or more"),
        ("end_seconds", "100000001", "at most 100,000,000 seconds"),
        ("price_usd_per_hour", "1e7", "at most 1,000,000 US dollars per hour"),
        ("body_mb", "1e7", "at most 1,000,000 megabytes"),
    ],
)
def test_numbers_are_finite_and_in_range(name, text, expected):
    define = functools.partial(flags.DEFINE_float, name, 1.0, "A number.")
    assert expected in objection(define, text)
    assert objection(define, "0.5") is None


def test_lower_bounds_allow_negative_numbers():
    define = functools.partial(flags.DEFINE_integer, "port", 1, "A port.", lower_bound=-1)
    assert objection(define, "-1") is None
    assert "at most 1,000,000,000,000" in objection(define, "1000000000001")


@pytest.mark.parametrize("text", ["gs://bucket/a", "name=s3://bucket/a", "a,hdfs://b/c"])
def test_urls_are_refused(text):
    define = functools.partial(flags.DEFINE_list, "folders", [], "Directories.")
    assert "is a URL; give a path" in objection(define, text)


def test_objections_are_one_line(run):
    process = run("--source=value", "--seconds=nan")
    assert process.returncode == 1
    assert process.stderr == "copy_file.py: --seconds=nan: give a finite number\n"


@pytest.mark.parametrize(("source", "details"), [("memory", "allocate 9 TiB"), ("device", "OOM")])
def test_too_little_memory_is_one_line_with_a_remedy(run, source, details):
    (line,) = run(f"--source={source}").stderr.splitlines()
    assert f"{details}); use smaller batches" in line


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("full", "No space left on device; free disk space"),
        ("full_checkpoint", "a/part-0; No space left on device; free disk space"),
        ("missing", "models/a: No such file or directory; give a path"),
    ],
)
def test_errors_of_the_file_system_name_the_file_and_a_remedy(run, source, message):
    (line,) = run(f"--source={source}").stderr.splitlines()
    assert line.startswith(f"copy_file.py: {message}")
    assert "memory" not in line


@pytest.mark.parametrize(
    ("streams", "code", "problem"),
    [
        ("| true", 0, "has no reader any more"),
        ("> /dev/full", 1, "cannot be written (No space left on device)"),
        ("<&- >&- 2>&-", 0, None),
    ],
)
def test_a_program_outlives_its_output(tmp_path, streams, code, problem):
    (tmp_path / "long.py").write_text(
        "import os, pathlib, sys\n"
        "from kdist import program\n"
        "def main(_):\n"
        "    for n in range(10_000):\n"
        "        print('a line')\n"
        "    os.write(1, b'of a library')\n"
        "    with open('result', 'w') as file:\n"
        "        print(sys.stdout.isatty(), file=file)\n"
        "program.run(main)\n"
    )
    process = subprocess.run(
        ["sh", "-c", f"{sys.executable} long.py {streams}"],
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = f"long.py: the output {problem}; the program continues\n" if problem else ""
    assert (process.returncode, process.stderr) == (code, expected)
    assert (tmp_path / "result").read_text() == "False\n"


@pytest.mark.parametrize(("unbuffered", "output"), [("1", "early\n"), ("", "")])
def test_output_is_buffered_as_python_is_told(unbuffered, output):
    code = (
        "import os; from kdist import program; program.run(lambda _: print('early') or os._exit(0))"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60, env=environment) == output


def test_defects_keep_their_traceback(run):
    assert "Traceback" in run("--source=key").stderr


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [("interrupt", 130, "\ncopy_file.py: stopped by Ctrl-C\n"), ("peer", 75, "copy_file.py: C\n")],
)
def test_exit_codes(run, source, code, message):
    process = run(f"--source={source}")
    assert (process.returncode, process.stderr) == (code, message)


def test_ctrl_c_in_a_callback_of_the_garbage_collector_ends_the_program():
    """Python ignores exceptions there, and JAX has such a callback, which runs during imports."""
    code = """
import gc, signal, time
from kdist import program
def interrupt(*_):
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGINT)
def main(_):
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(30)
program.run(main)
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stderr) == (130, "\n-c: stopped by Ctrl-C\n")


def kdist(*arguments):
    command = [sys.executable, "-X", "importtime", "-m", "kdist", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "| tensorflow\n" not in re.sub(" +", " ", process.stderr)
    return process


def test_the_name_of_the_process_has_no_space(tmp_path):
    """Slurm's proctrack/linuxproc sends no signal to a process whose name has one."""
    flag, code = f"--run_dir={tmp_path}", "cat /proc/$PPID/comm"
    printed = kdist("launch", flag, "--", "sh", "-c", code).stdout
    assert printed == "[worker 0] kdist-launch\n"


def test_the_command_lists_its_programs():
    process = kdist()
    assert process.returncode == 0
    for name, (words, example) in COMMANDS.items():
        assert words in process.stdout
        assert example.startswith(f"kdist {name}")
    assert kdist("--help").stdout == process.stdout
    assert "absl" not in kdist().stderr  # it appears at once


@pytest.mark.parametrize(
    ("stream", "code", "error"),
    [
        ("> /dev/full", 1, "kdist: the output cannot be written (No space left on device)\n"),
        (">&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_the_list_of_programs_may_have_no_reader(stream, code, error):
    process = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m kdist --help {stream}"],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (code, error)


def test_ctrl_c_while_a_program_is_imported_is_one_line(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupt)
    monkeypatch.setattr(sys, "argv", ["kdist", "plan"])
    assert command_line.main() == 130
    assert capsys.readouterr().err == "\nkdist plan: stopped by Ctrl-C\n"


def test_the_command_names_the_nearest_program():
    process = kdist("trian")
    assert process.returncode == 1
    assert "did you mean 'train'" in process.stderr


def test_help_of_one_program_has_its_usage():
    lines = kdist("report", "--help").stdout.splitlines()
    assert lines[0] == "Usage: kdist report [--flag=value …] <run directories or URLs>"
    assert lines[2].startswith("Writes ")
    assert "Live page:" in lines


def test_help_of_a_program_with_flags_of_another_lists_its_own():
    process = kdist("tune", "--help")
    assert process.returncode == 0
    assert "--max_batch" in process.stdout
    assert "--minutes: Time for the search. (default: 5.0)" in process.stdout
    assert "--optimizer" not in process.stdout  # of `kdist train`
