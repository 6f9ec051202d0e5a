"""Prints the table of faults from the records of a test run.

KDIST_FAULT_TABLE=faults.jsonl make test-slow
python -m tests.faults.table faults.jsonl
"""

import json
import pathlib
import sys


def table(path):
    """Returns Markdown with the last record of each fault and strategy."""
    records = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    rows = {(record["fault"], record["strategy"]): list(record.values()) for record in records}
    head = list(records[0])
    lines = [head, ["--"] * len(head), *(list(map(_cell, row)) for _, row in sorted(rows.items()))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value):
    if isinstance(value, float):
        return f"{value:.1f}"
    return "—" if value is None else str(value)


if __name__ == "__main__":
    print(table(sys.argv[1]))
