"""Functions of users that a flag names: `module:function`, or `path.py:function`.

    check_reference("model", "my_models.py:small")          # without importing it
    model = call("my_models.py:small", width=8)

Errors that such a function raises keep their traceback.
"""

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from kdist.data.names import TEXT_PREFIX
from kdist.program import check_name

_REFERENCE = re.compile(r"(?P<where>[^:]+):(?P<name>[A-Za-z_]\w*)")
# A module that uses one of them may have names that its text does not show.
_DYNAMIC = {"globals", "setattr", "__getattr__", "exec", "*"}


class UserCodeFailed(Exception):
    """An error in a user's code, which `program.run` shows with its traceback."""


def is_reference(text: str) -> bool:
    """Returns whether a flag names a function, such as `module:function`."""
    return _REFERENCE.fullmatch(text) is not None and not text.startswith(TEXT_PREFIX)


def check_reference(flag: str, text: str):
    """Checks that the file or module exists and defines the name, without importing it.

    Raises:
        ValueError: it does not, is no Python, or imports a package that is not installed.
    """
    where, name = _REFERENCE.fullmatch(text).groups()  # type: ignore[union-attr]
    path = _source(where)
    if path is None:
        kind = "file" if where.endswith(".py") else "module"
        raise ValueError(
            f"--{flag}={text}: no {kind} {where}; give path.py:function, or module:function of a "
            "module in this directory or on PYTHONPATH"
        )
    if path.suffix != ".py":
        return
    names, functions = _names(path)
    if name not in names and not names & _DYNAMIC:
        check_name(f"function of {where}", name, functions)
    _check_imports(where, path)


def check_arguments(
    text: str, optional: Iterable[str], arguments: dict[str, Any], decorated: bool = False
):
    """Checks the arguments of a later `call` without importing the function's module.

    A function whose source does not show its signature is not checked, such as one that is
    imported, or defined twice.

    Args:
        text: `module:function` or `path.py:function`.
        optional: names of arguments that are passed if the function has such parameters.
        arguments: arguments that are passed in any case.
        decorated: whether decorators of the function keep its signature. Defaults to False, and
            decorated functions are not checked.

    Raises:
        ValueError: the function cannot be called with these arguments.
    """
    where, name = _REFERENCE.fullmatch(text).groups()  # type: ignore[union-attr]
    path = _source(where)
    if path is None or path.suffix != ".py":
        return
    tree = _parsed(path)
    found = [node for node in ast.walk(tree) if name in _defined_by(node)]
    if len(found) != 1 or found[0] not in tree.body or not isinstance(found[0], ast.FunctionDef):
        return
    if decorated or not found[0].decorator_list:
        _bound(text, _signature(found[0].args), dict.fromkeys(optional), arguments)


class _Default:
    """Default of a parameter, which messages show as it is written in the source."""

    def __init__(self, node: ast.expr):
        self._node = node

    def __repr__(self):
        return ast.unparse(self._node)


def _signature(arguments):
    """Returns the signature of a function in a source, without its annotations."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kinds = inspect.Parameter
    groups = (
        (kinds.POSITIONAL_ONLY, arguments.posonlyargs, defaults),
        (kinds.POSITIONAL_OR_KEYWORD, arguments.args, defaults[len(arguments.posonlyargs) :]),
        (kinds.VAR_POSITIONAL, [arguments.vararg], [None]),
        (kinds.KEYWORD_ONLY, arguments.kwonlyargs, arguments.kw_defaults),
        (kinds.VAR_KEYWORD, [arguments.kwarg], [None]),
    )
    return inspect.Signature(
        [
            kinds(node.arg, kind, default=kinds.empty if default is None else _Default(default))
            for kind, nodes, defaults in groups
            for node, default in zip(nodes, defaults, strict=False)
            if node is not None
        ]
    )


def _bound(text, signature, optional, arguments):
    """Returns the arguments, and the optional ones that the function has parameters for."""
    arguments = {k: v for k, v in optional.items() if k in signature.parameters} | arguments
    try:
        signature.bind(**arguments)
    except TypeError as error:
        remedy = "correct --model_args, or give the parameter a default"
        name = text.rpartition(":")[2]
        raise ValueError(f"{text}: {error}; {remedy}. It is {name}{signature}") from None
    return arguments


def call(text: str, optional: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Returns the result of the function that `text` names.

    Args:
        text: `module:function` or `path.py:function`.
        optional: arguments to pass if the function has parameters of these names.
        **arguments: arguments to pass in any case.

    Raises:
        ValueError: the function cannot be called with these arguments.
        UserCodeFailed: the module or the function raised an error.
    """
    where, name = _REFERENCE.fullmatch(text).groups()  # type: ignore[union-attr]
    try:
        function: Callable = getattr(_module(where), name)
        signature = inspect.signature(function)
    except Exception as error:
        raise UserCodeFailed(f"{text} failed: {type(error).__name__}: {error}") from error
    arguments = _bound(text, signature, optional or {}, arguments)
    try:
        return function(**arguments)
    except Exception as error:
        raise UserCodeFailed(f"{text} failed: {type(error).__name__}: {error}") from error


def check_module(where: str):
    """Checks that --code names a Python file, or a module that exists, without importing it.

    Raises:
        ValueError: it does not, or the file is no Python, or imports a package that is not
            installed.
    """
    path = _source(where)
    if path is None:
        raise ValueError(
            f"--code={where}: no such file or module; give my_code.py, or a module in this "
            "directory or on PYTHONPATH"
        )
    if path.suffix == ".py":
        _check_imports(where, path)


def custom_objects(where: str) -> dict[str, Any]:
    """Returns {name: class or function} of a Python file or module, for Keras to load a model.

    Raises:
        UserCodeFailed: the module raised an error.
    """
    try:
        names = vars(_module(where))
    except Exception as error:
        raise UserCodeFailed(f"{where} failed: {type(error).__name__}: {error}") from error
    return {
        name: value
        for name, value in names.items()
        if callable(value) and not str(getattr(value, "__module__", "")).startswith("keras")
    }


def parse_arguments(text: str) -> dict[str, Any]:
    """Returns --model_args, such as `width=8, activation="relu"`, whose values are literals.

    Raises:
        ValueError: the text is no list of such arguments.
    """
    try:
        parsed = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            raise ValueError("an argument has no name")
        if any(keyword.arg is None for keyword in parsed.keywords):
            raise ValueError("** is not supported")
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in parsed.keywords}  # type: ignore[misc]
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"--model_args={text} is no list of named values ({error}); write it as "
            "width=8,name='a'"
        ) from error


def _source(where):
    """Returns the path of a Python file or of a module's file; None if there is none."""
    if not where.endswith(".py"):
        return _source_of_module(where)
    path = pathlib.Path(where)
    return path if path.is_file() else None


def _source_of_module(name):
    """Returns the file of a module without importing its package; None if there is none."""
    folders = [os.getcwd(), *sys.path]
    for part in name.split("."):
        if folders is None or not part.isidentifier():
            return None
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return pathlib.Path(spec.origin) if spec.origin else None


def _parsed(path):
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is no Python: {error}") from error


def _check_imports(where, path):
    """Checks that the packages are there that a module imports before it does anything else.

    A neighbor of the module, or another statement, may change where Python looks for the next.

    Raises:
        ValueError: one is not installed.
    """
    folder = path.parent if where.endswith(".py") else pathlib.Path.cwd()
    find = importlib.machinery.PathFinder.find_spec
    for node in _parsed(path).body:
        if isinstance(node, ast.Import):
            packages = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages = [node.module.partition(".")[0]]  # type: ignore[union-attr]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            continue
        else:
            return
        for package in packages:
            if find(package, [str(folder)]):
                return
            is_known = package in sys.modules or find(package) is not None
            # Others find editable installations.
            if not is_known and importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"{path} imports {package} in line {node.lineno}, and no such module is "
                    f"installed; install it, or correct the import"
                )


def _names(path):
    """Returns all names that a module defines or uses, and the public functions among them."""
    tree = _parsed(path)
    found, functions = set(), []
    for node in ast.walk(tree):
        found |= _defined_by(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            functions += [node.name] * (node in tree.body and node.name[0] != "_")
    return found, functions


def _defined_by(node):
    """Returns the names that a node of a source defines, or by which it defines others."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).partition(".")[0]}
    if isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in _DYNAMIC):
        return {node.id}
    return set()


@functools.cache
def _module(where) -> ModuleType:
    if not where.endswith(".py"):
        _add_to_path(os.getcwd())
        return importlib.import_module(where)
    path = pathlib.Path(where).resolve()
    _add_to_path(str(path.parent))  # for its neighbors
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _add_to_path(folder):
    if folder not in sys.path:
        sys.path.insert(0, folder)
