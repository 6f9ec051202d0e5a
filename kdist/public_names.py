"""Public names: imported on demand, and deprecated names that work for one more release."""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


def import_on_demand(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that imports its public names on first use.

    `modules` maps a name to the module that defines it, relative to the package; the module of its
    own name is returned itself. `renamed` maps a deprecated name, which works for one more release,
    to its new name in the package or, such as `"kdist.Layout"`, elsewhere.
    """

    def getattribute(name):
        if renamed and name in renamed:
            owner, _, new_name = renamed[name].rpartition(".")
            message = f"{package}.{name} is deprecated. Use {owner or package}.{new_name}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            if owner:
                return getattr(importlib.import_module(owner), new_name)
            name = new_name
        if name not in modules:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}. Its public names are "
                f"{', '.join(sorted(modules))}"
            )
        module = importlib.import_module(f"{package}.{modules[name]}")
        return module if modules[name] == name else getattr(module, name)

    return getattribute


def renamed_argument(old: str, new: str) -> Callable[[F], F]:
    """Returns a decorator that accepts the keyword `old` for `new`, with a `DeprecationWarning`."""

    def decorate(function):
        @functools.wraps(function)
        def accepts_both(*args, **kwargs):
            if old in kwargs:
                warnings.warn(
                    f"the argument {old!r} of {function.__name__} is deprecated. Use {new!r}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return accepts_both

    return decorate
