"""Results of a finished run: its summary and its report page."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from kdist.run_directory import RunDirectory
from kdist.telemetry.writers.base import Writer

_logger = logging.getLogger(__name__)


def write_results(
    run: RunDirectory, writer: Writer, summary: Mapping[str, Any], report: bool = True
) -> pathlib.Path | None:
    """Writes the summary and the report page of a run, and passes them to its writer.

    A page that cannot be written is logged, as training has succeeded, and the page can be made
    later.

    Args:
        run: the run directory.
        writer: the writer of the run; it stays open.
        summary: results of the run.
        report: whether to write the page. Defaults to True.

    Returns:
        The path of the page; None without one.

    Raises:
        FileNotFoundError: the run directory was lost while the run continued.
    """
    from kdist.report import write

    writer.write_summary(summary)
    run.check_intact()
    if not report:
        return None
    try:
        page = write([run.path], run.report)
    except (OSError, ValueError) as error:
        _logger.warning(
            "the report was not written: %s. The results are in %s; write the report later with "
            "`kdist report %s --output=report.html`",
            error,
            run.summary,
            run.path,
        )
        return None
    writer.write_report(page)
    return page
