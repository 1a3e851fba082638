"""Log lines: one event, one line, whatever is in it."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.logs import JsonFormatter, LogfmtFormatter

FORMATTERS = [LogfmtFormatter(), JsonFormatter()]
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^ "=]+)(?: |$)')


def a_record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    """A record of one of the exporter's loggers, made at the epoch."""
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("gpu_hpc_exporter.scrape", logging.WARNING, "x.py", 1, message, args, info)
    made.created, made.msecs = 0.0, 7.0
    return made


def parse_line(formatter: logging.Formatter, line: str) -> dict[str, str]:
    """Fields of a line, read the way a log collector does."""
    if isinstance(formatter, JsonFormatter):
        return dict(json.loads(line))
    fields = _FIELD.findall(line)
    assert "".join(match[0] for match in _FIELD.finditer(line)) == line
    return {key: json.loads(value) if value.startswith('"') else value for key, value in fields}


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["logfmt", "json"])
@pytest.mark.parametrize(
    "message",
    [
        "up",
        "",
        "two words",
        "a=b",
        'say "hi"',
        'say"hi"',
        "back\\slash",
        "two\nlines",
        "cr\rlf\r\n",
        "tab\tnul\0esc\x1b[31m",
        "é中",
    ],
)
def test_a_line_stays_a_line(formatter: logging.Formatter, message: str) -> None:
    """Newlines, quotes and control characters are escaped, and the message can be read back."""
    line = formatter.format(a_record("%s", message))
    assert not re.search(r"[\x00-\x1f]", line)
    assert parse_line(formatter, line) == {
        "ts": "1970-01-01T00:00:00.007Z",
        "level": "warning",
        "logger": "scrape",
        "msg": message,
    }


def test_logfmt_is_plain_where_it_can_be() -> None:
    """Fields in a fixed order, quoted only where needed."""
    line = LogfmtFormatter().format(a_record("ready"))
    assert line == "ts=1970-01-01T00:00:00.007Z level=warning logger=scrape msg=ready"


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["logfmt", "json"])
def test_a_traceback_is_one_field(formatter: logging.Formatter) -> None:
    """An unexpected error's traceback is on the same line, complete and readable back."""
    try:
        int('bad\n"value"')
    except ValueError as error:
        line = formatter.format(a_record("failed", error=error))
    assert "\n" not in line
    fields = parse_line(formatter, line)
    assert fields["msg"] == "failed"
    assert fields["traceback"].startswith("Traceback (most recent call last):\n")
    assert fields["traceback"].endswith("literal for int() with base 10: 'bad\\n\"value\"'")


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["logfmt", "json"])
@given(message=st.text(max_size=60))
@settings(max_examples=100)
def test_any_message_can_be_read_back(formatter: logging.Formatter, message: str) -> None:
    """No text breaks a line or its fields."""
    line = formatter.format(a_record("%s", message))
    assert "\n" not in line
    assert parse_line(formatter, line)["msg"] == message


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["logfmt", "json"])
@pytest.mark.parametrize("character", ["\x7f", "\x85", "\x9b", "\u2028", "\u2029"])
def test_no_control_character_reaches_a_terminal(formatter: logging.Formatter, character: str) -> None:
    """Line separators and terminal controls above ASCII are escaped like those below."""
    assert formatter.format(a_record("a%sb", character)).isprintable()


def test_the_current_exception_alone_is_enough() -> None:
    """A call of log.exception inside an except block needs no argument."""
    try:
        int("gone")
    except ValueError:
        record = a_record("failed")
        record.exc_info = sys.exc_info()
    assert "base 10: 'gone'" in json.loads(JsonFormatter().format(record))["traceback"]
