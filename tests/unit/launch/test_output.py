"""Lines of tasks on the launcher's screen."""

import io

import pytest

from kdist.launch import task
from kdist.launch.task import LineSplitter, Screen


def shown(*pieces, seconds=0.0, close=True):
    """Returns the lines shown for pieces that arrive `seconds` apart."""
    splitter = LineSplitter(progress_seconds=5)
    found = [splitter.feed(piece, number * seconds) for number, piece in enumerate(pieces)]
    return [line for lines in found for line in lines] + (splitter.close() if close else [])


def test_lines_are_shown_when_they_are_complete():
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw", 0) == ["one"]
    assert splitter.feed(b"o\n\nthree", 0) == ["two", ""]
    assert splitter.close() == ["three"]
    assert splitter.close() == []


def test_split_and_invalid_characters():
    text = "80 % ━━━ ok".encode()
    assert shown(text[:6], text[6:] + b"\n") == ["80 % ━━━ ok"]
    assert shown(b"\xff\xfe binary\n") == ["\ufffd\ufffd binary"]


def test_windows_line_ends_are_line_ends():
    assert shown(b"one\r\n", b"two\r", b"\nthree\r\n") == ["one", "two", "three"]


@pytest.mark.parametrize(
    "bar",
    [
        [f"\r{n:3}%|{n * '#'}".encode() for n in range(1, 101)] + [b"\n"],  # tqdm
        [f"{n * chr(8)}\r{n:3}%|{n * '#'}".encode() for n in range(1, 101)] + [b"\n"],  # Keras
        [f"{n:3}%|{n * '#'}\r".encode() for n in range(1, 101)] + [b"\n"],
        [b"".join(f"\r{n:3}%|{n * '#'}".encode() for n in range(1, 101)) + b"\n"],  # in one piece
    ],
    ids=["before", "backspaces", "after", "at once"],
)
def test_a_progress_bar_does_not_flood_and_its_end_is_shown_once(bar):
    found = shown(*bar, b"next\n")
    assert found[-2:] == ["100%|" + 100 * "#", "next"]
    assert len(found) <= 4
    assert found.count(found[-2]) == 1


def test_a_slow_progress_bar_is_shown_every_few_seconds():
    bar = [f"\r{n:3}%".encode() for n in range(100)]
    assert shown(*bar, seconds=1) == ["  0%", *(f" {n:2}%" for n in range(5, 99, 5)), " 99%"]


def test_a_line_without_end_is_shown_in_pieces(monkeypatch):
    monkeypatch.setattr(task, "_MAX_LINE_BYTES", 10)
    assert shown(b"x" * 11, close=False) == ["x" * 11]


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_prefixes_have_colors_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = _Terminal(), io.StringIO()
    for stream in (terminal, file):
        screen = Screen(stream)
        screen.show("worker 0", "a")
        screen.show("worker 1", "b")
        screen.show("worker 0", "c")
    assert file.getvalue() == "[worker 0] a\n[worker 1] b\n[worker 0] c\n"
    first, second, third = terminal.getvalue().splitlines()
    assert first == "\x1b[36m[worker 0]\x1b[0m a"
    assert third.startswith("\x1b[36m")
    assert not second.startswith("\x1b[36m")
    monkeypatch.setenv("NO_COLOR", "1")
    Screen(terminal).show("worker 0", "d")
    assert terminal.getvalue().endswith("\n[worker 0] d\n")


def test_characters_that_a_stream_cannot_encode_are_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Screen(stream).show("worker 0", "━ 1")
    assert raw.getvalue() == b"[worker 0] ? 1\n"


def test_a_closed_output_is_reported_once_and_ends_nothing(capsys):
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError(32, "Broken pipe")

    screen = Screen(Closed())
    screen.show("worker 0", "a")
    screen.show("worker 0", "b")
    assert capsys.readouterr().err.count("the job continues") == 1
