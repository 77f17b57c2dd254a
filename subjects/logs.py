"""Logs of the processes that an agent starts: one JSON object a line on standard error, which the agent passes on."""

from __future__ import annotations

import os
import sys

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def log_json() -> None:
    """Writes logs from the level of ``$CARPOOL_LOG_LEVEL`` on, else info.

    Of a process that dies only the tail is kept: lines that nobody asked for would push the cause out of it.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS.get(os.environ.get("CARPOOL_LOG_LEVEL", ""), 20)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
