"""A stream that is open: deltas in, server-sent events out, without a task that wakes for each of them.

To wake a task, to let it wait for a future and to set a timer beside it costs more than to make the chunk. Here the exchange
calls back once per turn of the event loop in which something came; all of it is one write, each chunk an event of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.api.answer_parts import AnswerWriter
from broker.api.openai_answers import KEEP_ALIVE, AnswerHead
from broker.gateway.exchange import Ended, Exchange, Failed
from broker.http.cycle import HttpCycle


class SseStream:
    """Writes what an exchange brings to a cycle whose head is given already."""

    def __init__(
        self, exchange: Exchange, cycle: HttpCycle, writer: Callable[[AnswerHead, int], AnswerWriter], keep_alive_s: float
    ) -> None:
        """``writer`` as in a translation. Silence ends after ``keep_alive_s``: proxies cut silent connections (PAINS A9)."""
        self._exchange = exchange
        self._cycle = cycle
        self._keep_alive_s = keep_alive_s
        self._make_writer = writer
        self._writer: AnswerWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._written_s = self._loop.time()

    async def run(self) -> None:
        """Returns when the last byte is written, or when the client has left."""
        exchange, cycle = self._exchange, self._cycle
        exchange.on_news = cycle.on_writable = self._on_news
        self._timer = self._loop.call_later(self._keep_alive_s, self._on_timer)
        try:
            if not exchange.readable:
                cycle.write(KEEP_ALIVE, more=True)
            self._on_news()
            await self._over
        finally:
            exchange.on_news = cycle.on_writable = None
            self._timer.cancel()

    def _on_news(self) -> None:
        """There is something to read, or room to write it."""
        try:
            # While the client leaves too much unread, output gathers in the exchange, which bounds it.
            while not self._over.done() and not self._cycle.write_paused:
                if not self._write_next():
                    return
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)

    def _write_next(self) -> bool:
        """Writes what is there in one go; False when nothing was."""
        exchange = self._exchange
        if (piece := exchange.read_now()) is None:
            if exchange.left:
                self._over.set_result(None)
            return False
        # Not before there is news: until then the model may still be another one.
        writer = self._writer = self._writer or self._make_writer(exchange.head, exchange.input_tokens)
        data = b"" if isinstance(piece, Ended | Failed) else writer.events(piece)
        end = exchange.end_if_read()  # often it came with the last deltas
        if end is not None:
            data += writer.end(end.usage) if isinstance(end, Ended) else writer.fail(end.error)
        if data:
            self._cycle.write(data, more=end is None)
            self._written_s = self._loop.time()
        if end is not None:
            self._over.set_result(None)
        return True

    def _on_timer(self) -> None:
        """One timer for all waits: it looks when it fires whether there was silence."""
        now_s = self._loop.time()
        if now_s - self._written_s >= self._keep_alive_s:
            self._written_s = now_s
            if not self._cycle.write_paused:
                self._cycle.write(KEEP_ALIVE if self._writer is None else self._writer.quiet(), more=True)
        self._timer = self._loop.call_at(self._written_s + self._keep_alive_s, self._on_timer)
