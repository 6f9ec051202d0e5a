"""The page in a notebook, below the cell.

show(["runs/first", "runs/second"])
"""

import html
import os
from collections.abc import Sequence

from kdist.report.costs import Prices
from kdist.report.page import page_text


def show(
    run_directories: Sequence[str | os.PathLike],
    height: int = 720,
    price_usd_per_hour: Prices = None,
) -> None:
    """Shows the page of `write` below the cell of a notebook; the notebook grows by 5 MB or more.

    Args:
        run_directories: as in `write`.
        height: of the frame, in pixels. Defaults to 720.
        price_usd_per_hour: as in `write`.

    Raises:
        RuntimeError: this is no notebook.
        ValueError, FileNotFoundError, OSError: as in `write`.
    """
    if not _in_notebook():
        raise RuntimeError(
            "kdist.report.show needs a notebook to show the page in; elsewhere, "
            'kdist.report.write(runs, "report.html") makes a file for a browser'
        )
    from IPython.display import HTML, display

    page = html.escape(page_text(run_directories, price_usd_per_hour))
    frame = (
        f'<iframe srcdoc="{page}" title="kdist report" width="100%" height="{height}" '
        'style="border: 0"></iframe>'
    )
    # Within another element: IPython takes a bare frame for a mistake and warns.
    display(HTML(f"<div>{frame}</div>"))


def _in_notebook():
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")  # that of a terminal has none
