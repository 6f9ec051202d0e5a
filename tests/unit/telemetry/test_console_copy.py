"""The copy of standard output that W&B shows as the log of a run."""

import io
import sys

from kdist.telemetry.writers.wandb import ConsoleCopy


def test_lines_are_copied_and_written(monkeypatch):
    out, copied = io.StringIO(), []
    monkeypatch.setattr(sys, "stdout", out)
    copy = ConsoleCopy(lambda *line: copied.append(line))
    copy.start()
    print("first")
    print("a", end="")
    assert copied == [("stdout", "first\n")]
    for step in (1, 2):
        print(f"\b\b\r{step}/2", end="")
    print()
    print("no end", end="")
    copy.stop()
    print("later")
    assert [text for _, text in copied] == ["first\n", "2/2\n", "no end\n"]
    assert out.getvalue() == "first\na\b\b\r1/2\b\b\r2/2\nno endlater\n"


def test_a_stream_that_cannot_be_copied_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    copy = ConsoleCopy(lambda *line: None)
    copy.start()
    copy.stop()
