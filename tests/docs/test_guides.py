"""Runs the programs of the documentation: the Python blocks of each page, in one process.

A block is not run if a comment before it says why: `<!-- not run: needs GPUs -->`. A comment
`<!-- in tests: A -> B -->` anywhere on a page replaces A by B, for examples that need a network or
minutes. `<!-- setup … -->` holds code that a reader does not need, such as one that creates files.
Commands of a page are checked for flags that do not exist.
"""

import doctest
import pathlib
import re

import pytest

from tests.forked import python, run_program
from tests.tiers import seldom

ROOT = pathlib.Path(__file__).parents[2]
# Pages that conf.py copies or generates are tested where they come from.
_BUILT = ("project", "reference", "tutorials", "results", "_extensions", "_build")
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").glob("**/*.md"))
        if not set(_BUILT) & set(page.relative_to(ROOT).parts)
    ),
]
_BLOCK = re.compile(
    r"(<!-- not run: [^>]+ -->\n+)?^```(\w+)\n(.*?)^```$|^<!-- setup\n(.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_REPLACEMENT = re.compile(r"<!-- in tests: (.+?) -> (.+?) -->")
_COMMAND = re.compile(r"kdist (train|launch|check|plan|tune|report|serve|export|compare)\b(.*)")
_FLAG = re.compile(r"(?<=\s)--(?!no\b)([a-z0-9_]+)")


def programs(page):
    """Returns the Python blocks of a page that are run, in order, with its replacements."""
    text = page.read_text()
    blocks = [
        setup or (code if language == "python" else _applied(code))
        for skipped, language, code, setup in _BLOCK.findall(text)
        if setup or (language in ("python", "diff") and not skipped)
    ]
    for old, new in _REPLACEMENT.findall(text):
        assert any(old in code for code in blocks), f"{page.name} does not contain {old!r}"
        blocks = [code.replace(old, new) for code in blocks]
    return blocks


def _applied(diff):
    """Returns the program that a diff of a whole file leads to."""
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))


def commands(page):
    """Yields pairs of a subcommand and the flags that it receives on a page."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    for line in text.splitlines():
        for part in re.split(r" -- ", line):
            for command, rest in _COMMAND.findall(part):
                yield command, set(_FLAG.findall(re.split(r"[`#|]", rest)[0]))


_NAMES = [str(page.relative_to(ROOT)) for page in PAGES if programs(page)]
# In CI, the pages that most readers start with.
_FIRST = ["README.md", "docs/quickstart.md", "docs/guides/own_model.md"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_FIRST, *seldom(_NAMES, other_than=_FIRST)])
def test_programs_of_a_page_run(name, tmp_path):
    code = "\n".join(programs(ROOT / name))
    start = f"import os\nos.chdir({str(tmp_path)!r})\n"
    python(f"{start}{code}\nprint('null')", environment={"WANDB_MODE": "offline"})


def test_examples_of_concepts_have_the_results_that_they_show():
    text = (ROOT / "docs" / "concepts.md").read_text()
    code = "".join(block[2] for block in _BLOCK.findall(text) if block[1] == "pycon")
    examples = doctest.DocTestParser().get_doctest(code, {}, "concepts.md", None, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0
    assert examples.examples


def test_commands_use_flags_that_exist():
    used = {}
    for page in PAGES:
        for command, flags in commands(page):
            used.setdefault(command, set()).update(flags)
    assert used
    for command, flags in used.items():
        help_text = run_program(ROOT / "scripts" / f"{command}.py", "--helpfull").stdout
        known = set(re.findall(r"^\s*--(?:\[no\])?([a-z0-9_]+)", help_text, re.MULTILINE))
        unknown = {flag for flag in flags - known if flag.removeprefix("no") not in known}
        assert not unknown, f"kdist {command} has no flags {sorted(unknown)}"
