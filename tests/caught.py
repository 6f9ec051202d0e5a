"""Warnings of the code under test."""

import contextlib
import warnings


@contextlib.contextmanager
def no_warnings(*, message=""):
    """Asserts that nothing warns with this text.

    Warnings that are errors would not do: kdist tries another way if a trace of a step fails.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(warning.message) for warning in caught]
    assert not [text for text in found if message in text]
