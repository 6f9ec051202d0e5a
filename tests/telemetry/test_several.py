import json

import pytest

from kdist.run_directory import RunDirectory
from kdist.telemetry import NullWriter, RunWriter, SeveralWriters, WandbWriter, create_writer

RECORD = {"kind": "epoch", "epoch": 1, "step": 2, "examples": 64, "seconds": 1.0, "loss": 0.5}
DEVICE = {"time": 1.0, "seconds": 1.0, "host": "a", "device": "cpu/0", "utilization": 0.5}


class Broken(NullWriter):
    def __init__(self, method):
        self.calls = []
        setattr(self, method, self._fail)

    def _fail(self, *arguments, **_):
        self.calls.append(arguments)
        raise RuntimeError("no more of this")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def use(writer, report):
    for _ in range(3):
        writer.write(RECORD)
        writer.write_device(DEVICE)
    writer.write_summary({"test_accuracy": 0.9})
    writer.write_report(report)
    writer.write_model(report, {}, aliases=["best"])
    writer.close()


@pytest.mark.parametrize(
    "method", ["write", "write_device", "write_summary", "write_model", "close"]
)
def test_a_failing_writer_does_not_affect_the_others(tmp_path, capsys, method):
    broken, run = Broken(method), RunDirectory(tmp_path)
    use(SeveralWriters([broken, RunWriter(run)]), run.report)
    assert lines(run.metrics) == [RECORD] * 3
    assert lines(run.devices) == [DEVICE] * 3
    assert json.loads(run.summary.read_text()) == {"test_accuracy": 0.9}
    said = capsys.readouterr().err
    assert said.count("Broken failed and is disabled: RuntimeError: no more of this") == 1
    # Left out from then on; closed once more for what it may hold.
    assert len(broken.calls) == (2 if method == "close" else 1)


def test_the_run_directory_alone(tmp_path):
    run = RunDirectory(tmp_path / "new")
    writer = create_writer(run, is_chief=True)
    assert isinstance(writer, RunWriter)
    use(writer, run.report)
    writer.close()
    writer.write(RECORD)
    assert lines(run.metrics) == [RECORD] * 3


def test_only_the_chief_writes(tmp_path):
    run = RunDirectory(tmp_path / "new")
    writer = create_writer(run, is_chief=False, wandb_mode="online", tensorboard=True)
    assert isinstance(writer, NullWriter)
    use(writer, run.report)
    assert not run.path.exists()


def test_training_continues_if_the_directory_is_not_writable(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = RunDirectory(tmp_path / "file" / "below")
    use(create_writer(run, is_chief=True, tensorboard=True), run.report)
    said = capsys.readouterr().err
    for what in (
        "the run directory",
        "metrics.jsonl",
        "devices.jsonl",
        "the summary",
        "TensorBoard",
    ):
        assert said.count(what) == 1, said


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mode 'on'.*auto, online, offline"):
        create_writer(RunDirectory(tmp_path), is_chief=True, wandb_mode="on")


@pytest.mark.parametrize("mode", ["disabled", "off"])
def test_without_wandb_nothing_is_started(tmp_path, mode):
    writer = WandbWriter(tmp_path / "new", mode)
    use(writer, tmp_path / "report.html")
    assert writer.location is None
    assert not (tmp_path / "new").exists()
