"""JSON texts from outside: files of users and of runs, messages, and environment variables."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: the text, or its bytes in UTF-8.

    Returns:
        A dictionary, list, string, number, boolean, or None.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply, for which `json` itself raises a
            RecursionError.

    Example:

        >>> parse_json('{"step": 3}')
        {'step': 3}
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
