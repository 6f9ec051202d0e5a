"""Sphinx extension: one page of the API reference per public package of kdist.

`reference_packages` in conf.py lists the packages. A page has a table of the public names and
their documentation, both read from the package, so that a new name in an `__all__` appears.
"""

import importlib
import inspect
import pathlib

_PAGE = """# {name}

```{{eval-rst}}
.. currentmodule:: {name}
{table}
.. automodule:: {name}
```
"""


def setup(app):
    app.add_config_value("reference_packages", [], "env")
    app.connect("config-inited", _write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write_pages(app, config):
    directory = pathlib.Path(app.srcdir, "reference")
    directory.mkdir(exist_ok=True)
    for stale in set(directory.glob("kdist*.md")) - {
        directory / f"{name}.md" for name in config.reference_packages
    }:
        stale.unlink()
    for name in config.reference_packages:
        text = _PAGE.format(name=name, table=_table(name))
        page = directory / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _table(name):
    names = public_names(importlib.import_module(name))
    return "\n".join(
        ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {public}" for public in names), ""]
    )


def public_names(module):
    """Returns the functions and classes that a package documents, in order."""
    documented = [
        name
        for name in getattr(module, "__all__", vars(module))
        if _is_documented(module, name, getattr(module, name))
    ]
    return sorted(documented, key=str.lower)


def _is_documented(module, name, value):
    is_code = inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))
    if name.startswith("_") or not is_code:
        return False
    return hasattr(module, "__all__") or value.__module__ == module.__name__
