"""Runs of the programs, each in a new process."""

import json
import pathlib
import re
import signal
import subprocess
import sys

import keras
import pytest

from kdist.checkpoint import CheckpointFiles
from tests.forked import run_program

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
DIGITS = ["--dataset=digits", "--verbose=0"]


def program(name, *flags):
    return run_program(SCRIPTS / f"{name}.py", *flags)


def train(run_dir, *flags):
    process = program("train", f"--run_dir={run_dir}", *DIGITS, *flags)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((run_dir / "summary.json").read_text()), process.stdout


@pytest.mark.slow
def test_one_device_and_two_give_the_same_test_loss(tmp_path):
    """Float32 with synchronized BatchNormalization, at equal global batch.

    Uses Inception: ResNet-18's float32 gradients differ by a percent if only the order of the
    examples in a batch changes on one device, so no layout can reach 1e-4. Inception reaches 2e-5
    for eight steps; after 16 the order alone causes 1e-3 with some kernels.
    """
    same = ["--model=inception", "--examples=256", "--learning_rate=0.01", "--sync_batch_norm"]
    one, _ = train(tmp_path / "1", "--strategy=one_device", "--local_batch_size=32", *same)
    two, printed = train(
        tmp_path / "2", "--strategy=mirrored", "--num_devices=2", "--local_batch_size=16", *same
    )
    assert one["global_batch_size"] == two["global_batch_size"] == 32
    assert two["test_loss"] == pytest.approx(one["test_loss"], abs=1e-4)
    assert two["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=1e-6)

    assert two["devices"] == ["CPU:0", "CPU:1"]
    assert (two["strategy"], two["num_replicas"]) == ("MirroredStrategy", 2)
    assert two["versions"]["tensorflow"].startswith("2.")
    assert all(f" {name} " in printed.partition("next:")[2] for name in ("report", "export"))
    for shown in ("test accuracy 0.", "sec/epoch", "examples/sec", "on CPU:0, CPU:1", "report: "):
        assert shown in printed
    assert sorted(path.name for path in (tmp_path / "2").iterdir()) == [
        "checkpoints",
        "config.json",
        "devices.jsonl",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]
    config = json.loads((tmp_path / "2" / "config.json").read_text())
    assert (config["dataset"], config["seed"], config["num_devices"]) == ("digits", 0, 2)


@pytest.mark.slow
def test_minutes_limit_the_examples(tmp_path):
    flags = ["--model=lenet", "--strategy=one_device", "--local_batch_size=32"]
    short, printed = train(tmp_path / "short", *flags, "--minutes=0.01")
    assert short["examples"] == 4 * 32  # the start already took longer
    assert "0.01 minutes are enough for 128 of 1,437 examples" in printed
    long, _ = train(tmp_path / "long", *flags, "--minutes=30")
    assert long["examples"] == 1437


@pytest.mark.slow
def test_other_flags(tmp_path):
    summary, _ = train(
        tmp_path / "run",
        "--model=lenet",
        "--devices=CPU:0,CPU:1",
        "--strategy=mirrored",
        "--reduction=reduction_to_one_device",
        "--precision=mixed_bfloat16",
        "--steps_per_execution=4",
        "--epochs=8",
        "--optimizer=adam",
        "--learning_rate=0.01",
        "--schedule=ramp",
        "--scale_learning_rate=sqrt",
        "--base_batch_size=64",
        "--local_batch_size=32",
        "--operations=random_crop(8, 8, padding=1)",
    )
    assert summary["precision"] == "mixed_bfloat16"
    assert summary["test_accuracy"] > 0.6  # chance is 0.1
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["step"] == 8 * (1437 // 64)
    assert json.loads(last)["examples"] == 64 * 8 * (1437 // 64)


def test_local_sgd(tmp_path):
    summary, printed = train(
        tmp_path / "run",
        "--model=mlp",
        *("--strategy=mirrored", "--num_devices=2"),
        *("--local_steps=4", "--local_slots=average", "--steps_per_execution=4"),
    )
    assert (summary["local_steps"], summary["local_slots"]) == (4, "average")
    assert "2 replicas × 64, 4 local steps, slots: average)" in printed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--local_batch_size=2000"], "--local_batch_size) to 1437 or less"),
        (["--examples=5000"], "--examples to a number from 1 to 1437"),
    ],
)
def test_flags_that_do_not_fit_the_data_are_rejected_with_a_remedy(tmp_path, flags, expected):
    process = program("train", f"--run_dir={tmp_path / 'run'}", *DIGITS, "--model=mlp", *flags)
    assert process.returncode == 1
    assert expected in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "run").exists()


def test_another_run_is_not_overwritten(tmp_path):
    mirror = tmp_path / "bucket" / "run"
    summary, printed = train(tmp_path / "run", "--model=mlp", f"--mirror=file://{mirror}")
    assert f"run directory: {tmp_path / 'run'}, copied to file://{mirror}\n" in printed
    for name in ("config.json", "metrics.jsonl", "summary.json", "report.html"):
        assert (mirror / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    process = program("train", f"--run_dir={tmp_path / 'run'}", *DIGITS, "--model=mlp")
    assert process.returncode == 1
    assert "already holds a finished run (mlp on digits)" in process.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    process = program("train", f"--run_dir={tmp_path / 'run'}", *DIGITS, "--model=mlp")
    assert process.returncode == 0, process.stderr
    assert "test accuracy" in process.stdout
    assert "report: " not in process.stdout
    assert f"kdist report {tmp_path / 'run'} --output=" in process.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_after_ctrl_c_the_command_that_continues_is_shown(tmp_path):
    flags = [*DIGITS, "--model=mlp", "--epochs=2000", "--verbose=2", "--num_devices=2"]
    arguments = [sys.executable, "-u", SCRIPTS / "train.py", *flags, "--strategy=mirrored"]
    outputs = []
    for _ in range(2):
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
        ) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("Epoch 3/"):
                    process.send_signal(signal.SIGINT)
        assert process.returncode == 130
        outputs.append("".join(lines))
    run, command = re.search(r"in (runs/\S+)\nto continue: (.+)\n", outputs[0]).groups()
    assert f"run directory: {run}\n" in outputs[0]
    assert command.endswith(f"--strategy=mirrored --run_dir={run}")
    assert (tmp_path / run / "checkpoints").is_dir()
    # The same command shows it again, and starts another run.
    assert f"{run} was interrupted; to continue it: {command}\n" in outputs[1]


DELETING = """
import os, runpy, shutil, sys
from kdist.callbacks import EpochCheckpoint

run_dir, sys.argv = sys.argv[1], sys.argv[2:]
save = EpochCheckpoint.on_epoch_end

def save_after_deletion(self, epoch, logs=None):
    if epoch == 1:
        os.rename(run_dir, run_dir + "-deleted")  # another thread may be writing a checkpoint
        shutil.rmtree(run_dir + "-deleted", ignore_errors=True)
    save(self, epoch, logs)

EpochCheckpoint.on_epoch_end = save_after_deletion
sys.path.insert(0, str(sys.argv[0]).rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_directory_that_is_deleted_is_reported_and_fails(tmp_path):
    (tmp_path / "deleting.py").write_text(DELETING)
    run_dir = tmp_path / "run"
    flags = [SCRIPTS / "train.py", f"--run_dir={run_dir}", *DIGITS, "--model=mlp", "--epochs=3"]
    process = run_program(tmp_path / "deleting.py", run_dir, *flags)
    assert process.returncode == 1
    assert "test accuracy" in process.stdout, process.stderr
    last = process.stderr.splitlines()[-1]
    assert all(word in last for word in ("config.json", "was deleted", "another --run_dir"))
    assert "Traceback" not in process.stderr
    # The weights are kept.
    assert keras.saving.load_model(run_dir / "checkpoints" / "epoch-0003.keras").built
    assert CheckpointFiles(run_dir / "checkpoints").newest() is not None


def test_nonfinite_loss_stops_the_run(tmp_path):
    flags = ["--model=mlp", "--learning_rate=1e20", "--schedule=constant", "--epochs=3"]
    process = program("train", f"--run_dir={tmp_path / 'run'}", *DIGITS, *flags)
    assert process.returncode == 1
    assert "the loss became NaN or infinite at step " in process.stderr
    assert "The last good model is " in process.stderr
    assert "Traceback" not in process.stderr
    last_good = max((tmp_path / "run" / "checkpoints").iterdir())
    assert str(last_good) in process.stderr
    model = keras.saving.load_model(last_good)
    assert all(keras.ops.all(keras.ops.isfinite(weight)) for weight in model.weights)


@pytest.mark.slow
def test_fallback_dataset_is_used_with_a_warning(tmp_path):
    process = program(
        "train",
        f"--run_dir={tmp_path / 'run'}",
        "--dataset=mnist",
        f"--data_dir={tmp_path}",
        "--nodownload",
        "--model=mlp",
        "--verbose=0",
        "--fallback_dataset=digits",
        "--fallback_epochs=2",
        "--minutes=0.01",
    )
    assert process.returncode == 0, process.stderr
    assert "mnist is not prepared" in process.stderr
    assert process.stderr.count("Training on digits instead.") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["dataset"], summary["epochs"]) == ("digits", 2)
    assert summary["examples"] == 4 * 64  # --minutes also limits those of the fallback


def test_help_has_examples_and_flags():
    process = program("train", "--help")
    assert "kdist train --strategy=mirrored --num_devices=2" in process.stdout
    for flag in ("--local_batch_size", "sync_batch_norm", "--run_dir"):
        assert flag in process.stdout


@pytest.mark.exhaustive
def test_check_reports_working_strategies():
    process = program("check", "--strategies=one_device,mirrored,central_storage")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "works: one_device, mirrored, central_storage" in process.stdout
    assert "tensorflow 2." in process.stdout
    broken = program("check", "--strategies=tpu")
    assert broken.returncode == 1
    assert "no TPU answers" in broken.stdout
    assert "does not work here: tpu" in broken.stdout


@pytest.mark.exhaustive
def test_later_runs_read_what_xla_compiled_for_earlier_ones(tmp_path):
    losses, files = [], []
    for name in ("first", "second", "third"):
        command = [sys.executable, "-m", "kdist", "train", f"--run_dir={tmp_path / name}", *DIGITS]
        flags = ["--model=mlp", "--examples=64", f"--compile_cache={tmp_path / 'cache'}"]
        flags += ["--jit_compile", "--strategy=one_device", "--local_batch_size=32"]
        subprocess.run([*command, *flags], check=True, timeout=300)
        losses.append(json.loads((tmp_path / name / "summary.json").read_text())["test_loss"])
        found = (tmp_path / "cache").rglob("*.pb")
        files.append({path.name: path.stat().st_ino for path in found})
    assert files[0]
    # XLA's names count what was compiled, so the second run can compile something once more.
    assert files[0].items() <= files[1].items(), "compiled and written again"
    assert files[1] == files[2]
    assert len(set(losses)) == 1


@pytest.mark.exhaustive
def test_sharded_replicas(tmp_path):
    """`check` prints the bytes on each device, and `train` trains whole replicas."""
    layout = "--layout=data=2,shard=optimizer"
    process = program("check", layout, "--model=mlp", "--input_shape=8,8,1")
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines() if line.startswith("CPU:")]
    assert [device for device, *_ in lines] == ["CPU:0", "CPU:1"]
    train(tmp_path / "run", layout, "--model=mlp", "--optimizer=adam")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["layout"] == "data=2,shard=optimizer"


def test_report_of_a_run(tmp_path):
    train(tmp_path / "run", "--model=mlp")
    page = tmp_path / "page.html"
    process = program("report", str(tmp_path / "run"), f"--output={page}")
    assert process.returncode == 0
    assert str(page) in process.stdout
    assert "digits" in page.read_text()
    nothing = program("report", str(tmp_path / "nowhere"))
    assert nothing.returncode == 1
    assert "is no run directory" in nothing.stderr
    assert program("report").returncode == 1
