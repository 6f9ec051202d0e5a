#!/usr/bin/env python3
"""Checks the rules of the house: language, docstrings, size of folders, names, and printing.

    python tools/house.py                       # every check over kdist/, against tools/house.json
    python tools/house.py --list kdist/planner  # every place to look at in one folder
    python tools/house.py --lower               # writes lower counts to tools/house.json

Counts are compared with the budgets in `tools/house.json`. A count above its budget fails; a count
below it asks to lower the budget, so that budgets only fall. Exits with 1 if a check fails.
"""

import argparse
import ast
import collections
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BUDGETS = ROOT / "tools" / "house.json"

# A summary that starts with one of these is a fragment, not a sentence or a noun phrase.
FRAGMENT_STARTS = re.compile(
    r"(what|whether|which|where|who|whose|how|of|to|with|without|those|as|it|its|so|that|from|by"
    r"|in|on|at|under|after|before|than|between)\Z",
    re.IGNORECASE,
)
# Words that docs/internals/style.md replaces.
WORDS = re.compile(
    r"\b(weigh(?:s|ed|ing)?|anew|so many|so long|goes on|go on|going on|is told|are told|is said"
    r"|handed out|hands out|hands on|handed on|shut out|puts right|put right|beside|cannot be had"
    r"|can be had|to be had|under way|in the place of|shall not|he is)\b",
    re.IGNORECASE,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


class Module:
    """One parsed file.

    Args:
        path: the file, below `ROOT`.
    """

    def __init__(self, path):
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text()
        self.tree = ast.parse(self.text)

    @property
    def public_names(self):
        """The names in `__all__`, also where it is `sorted(_PUBLIC)`; empty without one."""
        values = {
            getattr(node.targets[0], "id", ""): node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
        }
        names = []
        for node in ast.walk(values.get("__all__", ast.List(elts=[]))):
            if isinstance(node, ast.Constant):
                names.append(node.value)
            elif isinstance(node, ast.Name) and isinstance(values.get(node.id), ast.Dict):
                names += [key.value for key in values[node.id].keys if key is not None]
        return [name for name in names if isinstance(name, str)]


def fragments(module):
    """Yields places whose docstring summary is a fragment."""
    for node in ast.walk(module.tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            summary = text.strip().split("\n\n")[0].replace("\n", " ")
            words = re.findall(r"[A-Za-z`'_.]+", summary)
            if len(words) < 3 or FRAGMENT_STARTS.match(words[0].strip("`")):
                yield getattr(node, "lineno", 1), getattr(node, "name", ""), summary[:80]


def public_fragments(module):
    """Yields fragments whose name has no leading underscore."""
    return (found for found in fragments(module) if not found[1].startswith("_"))


def replaced_words(module):
    """Yields lines with a word that has a better one."""
    for number, line in enumerate(module.text.splitlines(), 1):
        for word in WORDS.findall(line):
            yield number, word, line.strip()[:80]


def prints(module):
    """Yields calls of `print`, except in the programs of `kdist.commands`."""
    if module.name.startswith("kdist/commands/"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            yield node.lineno, "print", "use logging.getLogger(__name__)"


def without_returns(module):
    """Yields public functions that return something and do not document it.

    A summary that starts with Returns or Yields documents it, except for names in an `__all__`.
    """
    for node in module.tree.body:
        if isinstance(node, _FUNCTIONS) and not node.name.startswith("_") and _gives(node):
            text = ast.get_docstring(node) or ""
            if not re.search(r"^(Returns|Yields|Gives)\b", text, re.MULTILINE):
                yield node.lineno, node.name, text.split("\n")[0][:80]


def _gives(function):
    """Returns whether a function returns or yields a value."""
    returns = function.returns
    if returns is not None:
        return not (isinstance(returns, ast.Constant) and returns.value is None)
    return any(
        isinstance(node, ast.Yield) or (isinstance(node, ast.Return) and node.value is not None)
        for node in _own_nodes(function)
    )


def _own_nodes(function):
    """Yields the nodes of a function without those of functions inside it."""
    nodes = list(function.body)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            nodes.extend(ast.iter_child_nodes(node))


def incomplete_public(modules):
    """Yields names in any `__all__` whose docstring lacks a section.

    Sections: Args for each parameter, Returns for a value, and an example. The docstring of a
    class may be followed by that of its `__init__`.
    """
    definitions = _definitions(modules)
    for module in modules:
        for name in module.public_names:
            node = definitions.get(_source(module, name), None)
            if node is None:
                continue
            lacks = list(_lacking(node))
            if lacks:
                yield module.name, name, "lacks " + ", ".join(lacks)


def _definitions(modules):
    """Returns {(dotted module, name): node} for all top-level definitions."""
    return {
        (_dotted(module), node.name): node
        for module in modules
        for node in module.tree.body
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef))
    }


def _dotted(module):
    return module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _source(module, name):
    """Returns where a public name is defined: (dotted module, name)."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if getattr(key, "value", None) == name and isinstance(value, ast.Constant):
                    return f"{_dotted(module)}.{value.value}", name
    return _dotted(module), name


def _lacking(node):
    text = ast.get_docstring(node) or ""
    function = node
    if isinstance(node, ast.ClassDef):
        function = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
        text += "\n" + ((function and ast.get_docstring(function)) or "")
    if not text.strip():
        yield "a docstring"
        return
    if function is not None:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if [a.arg for a in arguments if a.arg not in ("self", "cls")] and "Args:" not in text:
            yield "Args"
    returns = re.search(r"^(Returns|Yields):", text, re.MULTILINE)
    if isinstance(node, _FUNCTIONS) and _gives(node) and not returns:
        yield "Returns"
    if not re.search(r"^Examples?:|>>> |```", text, re.MULTILINE):
        yield "an example"


def shared_class_names(modules):
    """Yields public class names that several modules define."""
    places = collections.defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield where[0], name, "also in " + ", ".join(where[1:])


def large_folders(modules, most=15):
    """Yields folders with more than `most` modules, not counting `__main__`."""
    paths = [pathlib.Path(module.name) for module in modules]
    folders = collections.Counter(str(path.parent) for path in paths if path.stem != "__main__")
    for folder, count in sorted(folders.items()):
        if count > most:
            yield folder, count, f"more than {most} modules"


def loaded_by_callbacks():
    """Returns how many modules of kdist `import kdist.callbacks` loads."""
    code = (
        "import sys, kdist.callbacks; print(sum(m.split('.')[0] == 'kdist' for m in sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


PER_MODULE = {
    "fragments": fragments,
    "public_fragments": public_fragments,
    "replaced_words": replaced_words,
    "prints": prints,
    "functions_without_returns": without_returns,
}
OVER_ALL = {
    "incomplete_public": incomplete_public,
    "shared_class_names": shared_class_names,
    "large_folders": large_folders,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folders", nargs="*", default=["kdist"], help="folders or files")
    parser.add_argument("--list", action="store_true", help="print every place")
    parser.add_argument("--lower", action="store_true", help="write lower counts as budgets")
    arguments = parser.parse_args()
    chosen = [ROOT / folder for folder in arguments.folders]
    modules = [Module(path) for path in sorted((ROOT / "kdist").rglob("*.py"))]
    inside = [m for m in modules if any(m.path.is_relative_to(folder) for folder in chosen)]
    counts, places = {}, []
    for check, function in PER_MODULE.items():
        found = [(check, m.name, *place) for m in inside for place in function(m)]
        counts[check], places = len(found), places + found
    for check, function in OVER_ALL.items():
        found = [(check, *place) for place in function(modules)]
        found = [f for f in found if any((ROOT / f[1]).is_relative_to(c) for c in chosen)]
        counts[check], places = len(found), places + found
    counts["modules"] = len(inside)
    counts["lines"] = sum(len(module.text.splitlines()) for module in inside)
    if arguments.list:
        for place in places:
            print(*place)
    if arguments.folders != ["kdist"]:
        print(json.dumps(counts, indent=2))
        return 0
    counts["modules_loaded_by_callbacks"] = loaded_by_callbacks()
    return _compare(counts, arguments.lower)


def _compare(counts, lower):
    """Prints counts next to their budgets and returns the exit code.

    Counts without a budget, such as lines, are printed only.
    """
    budgets = json.loads(BUDGETS.read_text())
    over = [name for name, budget in budgets.items() if counts[name] > budget]
    for name, count in counts.items():
        budget = budgets.get(name, count)
        remark = "OVER BUDGET" if name in over else "lower the budget" * (count < budget)
        line = f"{name:30} {count:6} of {budgets.get(name, '-'):>6}  {remark}"
        print(line.rstrip())
    if lower:
        budgets = {name: min(counts[name], budget) for name, budget in budgets.items()}
        BUDGETS.write_text(json.dumps(budgets, indent=2) + "\n")
    if over:
        print(f"over budget: {', '.join(over)}. --list shows the places")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
