"""Environment variables of engines, read with errors that name the remedy."""

import re
from collections.abc import Mapping


def read_variable(environment: Mapping[str, str], name: str, remedy: str) -> str:
    """Returns the value of a variable that other variables require.

    Raises:
        ValueError: If it is not set, or empty.
    """
    if not environment.get(name):
        raise ValueError(f"{name} is not set, but other variables of its engine are; {remedy}")
    return environment[name]


def read_number(
    environment: Mapping[str, str], name: str, remedy: str, default: int | None = None
) -> int:
    """Returns the value of a variable as a number from 0.

    Raises:
        ValueError: If it is not such a number, or it is not set and there is no default.
    """
    if default is not None and name not in environment:
        return default
    text = environment[name] if name in environment else read_variable(environment, name, remedy)
    if not re.fullmatch("[0-9]{1,12}", text.strip()):
        raise ValueError(f"{name}={text} is not a number; {remedy}")
    return int(text)
