"""The table as text for a terminal, as Markdown, and as data."""

import pathlib

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
SHORT, LONG = 26, 90


def as_text(rows: dict, columns) -> str:
    """Lines for a terminal; long cells are cut.

    Args:
        rows: feature description -> {column: verdict}.
        columns: in the order to show.
    """
    head = ["feature", *(column.title for column in columns)]
    body = [
        [feature.name, *(_cut(row[column], SHORT) for column in columns)]
        for feature, row in rows.items()
    ]
    widths = [max(map(len, cells)) for cells in zip(head, *body, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, rule, *body)
    )


def as_markdown(rows: dict, columns, note: str) -> str:
    """A table with a line about each feature, and a note below."""
    lines = [
        "| feature | " + " | ".join(column.title for column in columns) + " |",
        "|--|" + "--|" * len(columns),
    ]
    for feature, row in rows.items():
        cells = " | ".join(_escaped(_cut(row[column], LONG)) for column in columns)
        lines.append(f"| **{_escaped(feature.name)}**: {_escaped(feature.text)} | {cells} |")
    return "\n".join([*lines, "", note])


def as_data(rows: dict, columns) -> list[dict]:
    """Returns the table for `json.dumps`: one dict per cell."""
    return [
        {
            "feature": feature.name,
            "description": feature.text,
            "library": column.library,
            "layout": column.layout,
            "replicas": column.replicas,
            "verdict": row[column].kind,
            # NaN and infinity are no JSON; they are in `says_in_full`.
            "difference": _finite(row[column].difference),
            "says": row[column].says,
            "says_in_full": str(row[column]),
        }
        for feature, row in rows.items()
        for column in columns
    ]


def check_can_be_written(path: pathlib.Path):
    """Raises a ValueError for a file of somebody's that has no place for the table."""
    if path.exists():
        _parts(path)


def write_markdown(path: pathlib.Path, table: str):
    """Puts the table between the two markers of a file, or into a file of its own.

    Raises:
        ValueError: the file exists and lacks the markers.
    """
    before, after = _parts(path) if path.exists() else ("# Keras and kdist, compared\n\n", "\n")
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def _parts(path):
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{path} exists and has no place for the table; put the lines {BEGIN} and {END} where "
            "it shall stand, or name a new file"
        )
    return before, after


def _cut(verdict, length):
    text = str(verdict)
    return text if len(text) <= length else text[: length - 1] + "…"


def _escaped(text):
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _finite(number):
    return number if number is not None and abs(number) < float("inf") else None
