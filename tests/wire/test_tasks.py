"""Tasks of a shell, and what is told of errors that nobody foresaw."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from ops import logs
from subjects.errors import place_of
from subjects.tasks import Tasks

SECRET = "my secret prompt"


def _raise(text: str) -> None:
    raise ValueError(text)


def _caught(text: str) -> ValueError:
    try:
        _raise(text)
    except ValueError as error:
        return error
    raise AssertionError


async def test_a_failed_task_is_told_and_the_others_end() -> None:
    """The failure reaches its owner; ``end`` waits for those that still run, and what comes later is not started."""
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    ended = asyncio.Event()

    async def fails() -> None:
        raise KeyError("x")

    async def runs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.spawn(fails(), runs())
    await asyncio.sleep(0.01)
    assert [type(failure) for failure in failures] == [KeyError] and not ended.is_set()
    await tasks.end()
    assert ended.is_set()
    tasks.spawn(fails())
    await asyncio.sleep(0.01)
    assert len(failures) == 1


def test_the_place_of_an_error_quotes_nothing() -> None:
    """Kind, files and lines are told; the text of the error is not (PAINS O4)."""
    told = place_of(_caught(SECRET))
    assert told.startswith("ValueError at test_tasks.py:") and SECRET not in told
    assert place_of(ValueError(SECRET)) == "ValueError"


def test_tracebacks_on_a_terminal_show_no_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pretty renderer would print local variables, payloads among them."""
    before = structlog.get_config()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    try:
        logs.configure("test")
        payload = SECRET.encode()
        try:
            _raise("short")
        except ValueError:
            structlog.get_logger().exception("a handler failed", size_bytes=len(payload))
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
    printed = capsys.readouterr().err
    assert "ValueError" in printed and SECRET not in printed
