"""Streams that are open and say nothing: what a system's memory grows by for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from ops.bench.fake_engine import HOLD
from ops.bench.peers import Target, body
from ops.bench.processes import NOTHING, Use, use_by_part
from subjects.errors import CarpoolError

OPEN_S_MAX = 60.0
"""All streams have had their first chunk by then, or the figure is not given."""
SETTLE_S = 1.0
_TOKENS = 256
_DIALS_MAX = 64


async def idle_growth_mb(target: Target, streams: int) -> dict[str, float]:
    """Growth of resident memory in 10^6 bytes of each part of ``target`` while ``streams`` streams are open.

    Raises:
        CarpoolError: not all of them could be opened.
    """
    # Sixteen first, so that what is loaded or allocated once is not counted as a stream's.
    await _grown(target, 16)
    return await _grown(target, streams)


async def _grown(target: Target, streams: int) -> dict[str, float]:
    before = use_by_part(target.pids)
    dials = asyncio.Semaphore(_DIALS_MAX)
    writers: list[asyncio.StreamWriter] = []
    try:
        async with asyncio.timeout(OPEN_S_MAX):
            await asyncio.gather(*(_open(target, index, dials, writers) for index in range(streams)))
        await asyncio.sleep(SETTLE_S)
        return _growth(before, use_by_part(target.pids))
    except TimeoutError:
        raise CarpoolError(f"not all of {streams} streams had a first chunk within {OPEN_S_MAX:.0f} s") from None
    except (OSError, EOFError, asyncio.LimitOverrunError) as error:
        raise CarpoolError(f"one of {streams} streams could not be opened: {type(error).__name__}") from None
    finally:
        for writer in writers:
            writer.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(SETTLE_S)


def _growth(before: Mapping[str, Use], after: Mapping[str, Use]) -> dict[str, float]:
    return {part: round(use.rss_mb - before.get(part, NOTHING).rss_mb, 2) for part, use in after.items()}


async def _open(target: Target, index: int, dials: asyncio.Semaphore, writers: list[asyncio.StreamWriter]) -> None:
    text = body(stream=True, tokens=_TOKENS, model=target.idle_model, prompt=HOLD).encode()
    async with dials:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writers.append(writer)
    key = target.keys[index % len(target.keys)]
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s" % (key.encode(), len(text), text)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        said = await reader.read(300)
        raise CarpoolError(f"a stream was refused: {head.splitlines()[0].decode()} {said.decode(errors='replace')}")
    await reader.readuntil(b"data: ")
