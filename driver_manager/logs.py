"""How log lines look: `key=value` for people, JSON for machines. The message is constant, values come as `extra` fields."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

bound: ContextVar[dict[str, Any]] = ContextVar("bound", default={})  # noqa: B039  # never changed in place
"""Fields that every line of the current task carries: node, run, step."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return bound.get() | {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        body = {"time": _time(record), "level": record.levelname.lower(), "message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then the fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in _fields(record).items())
        text = f"{_time(record)} {record.levelname:<7} {record.getMessage()}{pairs}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=\n' for c in text) else text


def set_up(log_format: str, level: str) -> None:
    """Sends log lines to standard error, once for the whole process.

    Args:
        log_format: `text`, `json`, or `auto`: text on a terminal.
        level: `debug`, `info`, `warning` or `error`.
    """
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
