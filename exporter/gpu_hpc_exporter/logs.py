"""One log line per event, as logfmt or JSON."""

from __future__ import annotations

import json
import logging
import time
from typing import Final, Literal

LogFormat = Literal["logfmt", "json"]
_SELDOM_S: Final = 60.0


class _LineFormatter(logging.Formatter):
    """Fields in a fixed order; a traceback becomes one escaped field, so a line stays a line."""

    converter = staticmethod(time.gmtime)

    def fields(self, record: logging.LogRecord) -> dict[str, str]:
        """What a line says."""
        fields = {
            "ts": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("gpu_hpc_exporter."),
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return fields


class LogfmtFormatter(_LineFormatter):
    """`key=value` pairs, quoted where needed."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return " ".join(f"{key}={self._quoted(value)}" for key, value in self.fields(record).items())

    @staticmethod
    def _quoted(value: str) -> str:
        plain = value and value.isprintable() and not set(value) & set(' ="')
        return value if plain else json.dumps(value, ensure_ascii=not value.isprintable())


class JsonFormatter(_LineFormatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return json.dumps(self.fields(record))


class _OneLine(logging.Filter):
    """What anybody on the network can provoke is one line without a traceback, once in ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -_QUIET_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        if record.levelno < logging.WARNING:
            return True
        if time.monotonic() - self._last < _QUIET_S:
            return False
        self._last = time.monotonic()
        if record.exc_info and record.exc_info[1] is not None:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]!r}"[:300], ()
            record.exc_info = None
        return True


_QUIET_S: Final = 10.0


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Log to standard error from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else LogfmtFormatter())
    for name in ("asyncio", "aiohttp.server"):
        logging.getLogger(name).addFilter(_OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class SeldomLog:
    """Warnings that strangers cause, thousands a second if they like: one a minute is logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s = 0.0

    def warning(self, text: str) -> None:
        """Log it, unless another one was within the last minute."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _SELDOM_S
            self._log.warning("%s", text)
