"""Sphinx extension: pages that live elsewhere in the repository, and links to its other files.

`repository_pages` in conf.py maps names of pages to files of the repository, such as CHANGELOG.md
and the notebooks. They are copied before the build, so that Sphinx finds them below docs/.

Relative links work on GitHub as they are. On the site, links to files that are no page of it lead
to the repository. A link to a file that does not exist is a warning.
"""

import os
import pathlib
import re
import shutil

from sphinx.util import logging

_logger = logging.getLogger(__name__)

# Markdown's [text](target) and ![text](target), also in the JSON of a notebook.
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_HAS_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def setup(app):
    app.add_config_value("repository_pages", {}, "env")
    app.add_config_value("repository", "", "env")
    app.connect("config-inited", _copy_pages)
    app.connect("source-read", _rewrite_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _copy_pages(app, config):
    root = pathlib.Path(app.srcdir).parent
    app.repository_files = {}
    for name, pattern in config.repository_pages.items():
        for source in sorted(root.glob(pattern)):
            page = name.format(stem=source.stem)
            app.repository_files[page] = source
            target = pathlib.Path(app.srcdir, page).with_suffix(source.suffix)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                shutil.copyfile(source, target)


def _rewrite_links(app, docname, content):
    docs = pathlib.Path(app.srcdir)
    source = app.repository_files.get(docname, docs / docname)
    pages = {file: docs / page for page, file in app.repository_files.items()}

    def rewritten(match):
        target, anchor = match[1], match[2] or ""
        if _HAS_SCHEME.match(target):
            return match[0]
        file = pathlib.Path(os.path.normpath(source.parent / target))
        if not file.exists():
            _logger.warning("%s does not exist", target, location=docname)
            return match[0]
        if file in pages:
            file = pages[file].with_suffix(file.suffix)
        elif docs not in file.parents:
            kind = "tree" if file.is_dir() else "blob"
            path = file.relative_to(docs.parent).as_posix()
            return f"https://github.com/{app.config.repository}/{kind}/main/{path}{anchor}"
        return os.path.relpath(file, (docs / docname).parent) + anchor

    content[0] = _LINK.sub(rewritten, content[0])
