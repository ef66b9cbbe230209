"""Writes train.log; a run goes on without it."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from gpipe_cli.disk import cannot_write

log = logging.getLogger("gpipe_cli")


class TrainLog(logging.FileHandler):
    """Appends records to a file, until it cannot be written: then it warns once, and writes nothing more."""

    def __init__(self, filename: str, encoding: str = "utf-8") -> None:
        super().__init__(filename, encoding=encoding, delay=True)  # opened by the first record: see emit
        self._lost = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record; never raises an OSError, and prints no traceback of one."""
        if self._lost:
            return
        try:
            if self.stream is None:
                self.stream = self._open()
            self.stream.write(f"{self.format(record)}{self.terminator}")
            self.stream.flush()
        except OSError as error:
            self._lost = True
            self.close()
            log.warning("%s; the run goes on without it", cannot_write(Path(self.baseFilename), error))

    def close(self) -> None:
        """Closes the file, also where its last records find no room."""
        with suppress(OSError):
            super().close()
