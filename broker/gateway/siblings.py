"""The processes of one gateway that share a port: how any of them tells the figures of all.

A scrape of ``/metrics`` meets one of the processes, and the next one meets another. Each therefore asks all others, over
Unix sockets in a directory that only their user can enter, and answers for all: every series carries the label ``process``,
so ``rate()`` sees a process that began again as what it is, and ``sum without (process) (...)`` gives the gateway's figure.
A process that does not answer within ``ASK_S_MAX`` is left out, and ``carpool_gateway_process_up`` says 0 for it.
``/health`` and ``/ready`` speak of the process that is asked: one that is down takes no connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

ASK_S_MAX = 1.0
TEXT_BYTES_MAX = 16 * 1024 * 1024
_UP = "carpool_gateway_process_up"


class Place(msgspec.Struct, frozen=True):
    """Which process of how many: ``index`` counts from 0. ``directory`` is theirs alone."""

    directory: Path
    index: int
    processes: int

    def socket_path(self, index: int) -> Path:
        """Where the process of this index answers its siblings."""
        return self.directory / f"{index}.sock"


@dataclass(eq=False, slots=True)
class Siblings:
    """Answers the other processes, and asks them."""

    _place: Place
    _own_text: Callable[[], bytes]
    """This process's figures in Prometheus's exposition format."""
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begins to answer; the socket of a process that was killed is taken over."""
        path = self._place.socket_path(self._place.index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def stop(self) -> None:
        """Answers no more."""
        if self._server is not None:
            self._server.close()
        self._place.socket_path(self._place.index).unlink(missing_ok=True)

    async def metrics(self) -> bytes:
        """The figures of all processes that answer."""
        place = self._place
        others = [index for index in range(place.processes) if index != place.index]
        texts = dict(zip(others, await asyncio.gather(*map(self._ask, others)), strict=True))
        texts[place.index] = self._own_text()
        return joined({index: texts[index] for index in sorted(texts)})

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_S_MAX):
                writer.write(self._own_text())
                await writer.drain()
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _ask(self, index: int) -> bytes | None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ASK_S_MAX):
                reader, writer = await asyncio.open_unix_connection(self._place.socket_path(index))
                try:
                    return await _read_all(reader) or None
                finally:
                    writer.close()
        return None


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts = []
    size = 0
    while part := await reader.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > TEXT_BYTES_MAX:
            return b""
    return b"".join(parts)


def joined(texts: Mapping[int, bytes | None]) -> bytes:
    """One exposition of several, each process's series with its label; None stands for one that did not answer.

    The format wants all lines of a family together under one ``HELP`` and ``TYPE``. The texts come from one program, so a
    family's lines follow its ``# HELP`` line, and a label can be put in by text alone.
    """
    heads: dict[bytes, list[bytes]] = {}
    lines: dict[bytes, list[bytes]] = {}
    for index, text in texts.items():
        label = b'process="%d"' % index
        family = b""
        for line in (text or b"").splitlines():
            if line.startswith(b"# HELP "):
                family = line.split(b" ", 3)[2]
                if family not in heads:
                    heads[family], lines[family] = [line], []
            elif line.startswith(b"#"):
                if len(heads[family]) == 1:
                    heads[family].append(line)
            elif line:
                name, brace, rest = line.partition(b"{")
                if brace:
                    lines[family].append(name + b"{" + label + b"," + rest)
                else:
                    name, _, value = line.partition(b" ")
                    lines[family].append(name + b"{" + label + b"} " + value)
    up = [b'%b{process="%d"} %d' % (_UP.encode(), index, text is not None) for index, text in texts.items()]
    out = [f"# HELP {_UP} Whether this process of the gateway answers.".encode(), f"# TYPE {_UP} gauge".encode(), *up]
    for family, head in heads.items():
        out += head
        out += lines[family]
    return b"\n".join(out) + b"\n"
