"""Logging of the library: the logger `kdist` and its children write to standard error.

Importing kdist adds a handler that prints lines such as `kdist: auto chose mirrored`. Change it as
with any logger:

    logging.getLogger("kdist").setLevel(logging.WARNING)     # fewer messages
    logging.getLogger("kdist.planner").addFilter(my_filter)  # one package
    logging.getLogger("kdist").handlers.clear()              # no messages
    logging.getLogger("kdist").propagate = True              # also to the root logger's handlers
"""

import logging
import sys


class _StderrHandler(logging.StreamHandler):
    """Handler for the current `sys.stderr`, which notebooks and tests replace."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def configure():
    """Adds a handler to the logger `kdist`, unless it has one."""
    logger = logging.getLogger("kdist")
    if logger.handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("kdist: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
