import os

import pytest

from kdist import log


def written_while_quiet(capfd, text):
    with log._without_start_up_lines():
        os.write(2, text.encode())
    return capfd.readouterr().err


def test_hides_only_lines_of_tensorflows_start(capfd):
    start = (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        "I0000 00:00:1795633768.239335    4839 port.cc:153] oneDNN custom operations are on.\n"
    )
    kept = (
        "E0000 00:00:1795633772.022741    4839 cuda_platform.cc:52] failed call to cuInit\n"
        "The TensorFlow library was compiled to use AVX512F instructions\n"
        "I am a user's line\n"
    )
    assert written_while_quiet(capfd, start + kept) == kept


def test_without_a_directory_for_temporary_files_lines_pass(capfd, monkeypatch):
    def fail():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(log.tempfile, "TemporaryFile", fail)
    assert written_while_quiet(capfd, "I am a user's line\n") == "I am a user's line\n"


def test_an_exception_and_its_lines_pass(capfd):
    def fail():
        with log._without_start_up_lines():
            os.write(2, b"half a line")
            raise OSError("no such library")

    with pytest.raises(OSError, match="no such library"):
        fail()
    assert capfd.readouterr().err == "half a line"
    os.write(2, b"after it")
    assert capfd.readouterr().err == "after it"
