"""Structured logs on stderr: coloured on a terminal, one JSON object per line elsewhere."""

from __future__ import annotations

import logging
import os
import sys

import structlog

LEVEL_VARIABLE = "CARPOOL_LOG_LEVEL"


def configure(part: str) -> None:
    """Sets structlog up for this process; every line names its ``part``. The level is ``$CARPOOL_LOG_LEVEL``, else info."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "info").upper(), logging.INFO)
    on_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        # Plain tracebacks: the pretty ones show the values of local variables, and those may be prompts and answers.
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if on_terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(() if on_terminal else (structlog.processors.format_exc_info,)),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(part=part)
