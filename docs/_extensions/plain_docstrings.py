"""Sphinx extension: docstrings with indented programs, in the manner of Markdown.

kdist's docstrings show programs as indented blocks, and names in single backticks. In
reStructuredText, an indented block is a quotation. This extension makes it a block of code, and
does so before napoleon reads the sections of a docstring.
"""

import ast
import itertools
import re

_SECTION = re.compile(r"(Example|Examples):$")
_CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?!`)(\w?)")
_LIST_ITEM = re.compile(r"([-*•]|\d+\.)\s")
# Runs before napoleon, which has the default priority of 500.
_BEFORE_NAPOLEON = 400


def setup(app):
    app.connect("autodoc-process-docstring", _process, priority=_BEFORE_NAPOLEON)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _process(app, what, name, found, options, lines):
    if what == "module":
        lines[:] = indent_programs(lines)
    lines[:] = mark_programs(lines)


def indent_programs(lines):
    """Returns the lines with those paragraphs indented that are Python, for `mark_programs`.

    Modules show their use at the beginning of the line.
    """
    result = []
    for is_blank, group in itertools.groupby(lines, lambda line: not line.strip()):
        paragraph = list(group)
        is_program = not is_blank and result and _is_python(paragraph)
        result += [f"    {line}" for line in paragraph] if is_program else paragraph
    return result


def _is_python(paragraph):
    try:
        return bool(ast.parse("\n".join(paragraph)).body)
    except SyntaxError:
        return False


def mark_programs(lines):
    """Returns the lines with a `code-block` directive before each indented program."""
    result, number = [], 0
    while number < len(lines):
        indent = _program_indent(lines, number)
        if indent is None:
            result.append(_as_literals(lines[number]))
            number += 1
            continue
        end = _end_of_block(lines, number, indent)
        outer = _section_indent(result)
        result += [*outer[0], f"{outer[1]}.. code-block:: python", ""]
        result += [f"{outer[1]}    {line[indent:]}".rstrip() for line in lines[number:end]]
        result.append("")
        number = end
    return result


def _as_literals(line):
    """Returns the line with `name` as ``name``, also where a letter follows, as in `Pipeline`s."""
    return _CODE.sub(lambda found: f"``{found[1]}``" + (found[2] and rf"\ {found[2]}"), line)


def _indent(line):
    return len(line) - len(line.lstrip())


def _program_indent(lines, number):
    """Returns the indentation of the program that starts at a line, or None."""
    line = lines[number]
    before = [text for text in lines[:number] if text.strip()]
    if not line.strip() or not before:
        return None
    if line.lstrip().startswith(">>> ") or _LIST_ITEM.match(line.lstrip()):
        return None
    previous = before[-1]
    starts_section = bool(_SECTION.match(previous.strip()))
    follows_gap = not lines[number - 1].strip()
    if _indent(line) <= _indent(previous) or not (starts_section or follows_gap):
        return None
    if previous.rstrip().endswith("::") or _LIST_ITEM.match(previous.lstrip()):
        return None
    return _indent(line)


def _end_of_block(lines, number, indent):
    end = number
    for place in range(number, len(lines)):
        if lines[place].strip():
            if _indent(lines[place]) < indent:
                break
            end = place + 1
    return end


def _section_indent(result):
    """Replaces an `Example:` header at the end of `result`; returns lines to add and the indent."""
    while result and not result[-1].strip():
        result.pop()
    last = result[-1]
    outer = " " * _indent(last)
    if _SECTION.match(last.strip()):
        result.pop()
        return [f"{outer}.. rubric:: Example", ""], outer
    return [""], outer
