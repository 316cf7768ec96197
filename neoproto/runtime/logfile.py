"""A log file of the controller, and what happens to it when the disk is full."""

from __future__ import annotations

import logging
import sys


class LogFileHandler(logging.FileHandler):
    """Leaves out what it cannot write; Python's own would print a traceback on the terminal for each line.

    A full disk ends the run by itself, with one line: by what writes the metrics, for one.

    Attributes:
        failure: the first error of writing, if there was one: then the file is not complete.
    """

    failure: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.failure = self.failure or error
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what was left to write does not fit either
            self.failure = self.failure or error
