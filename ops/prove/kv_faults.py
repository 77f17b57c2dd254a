"""The fault table of the KV tiers: whatever happens to files, node, source or Redis, the text is right and nothing hangs.

Between ask and ask the model is unloaded and its node killed, so that nothing is left but the files. A last row is the
control: pages with other KV and *right* checksums must change the text, else the table could not fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
from msgspec import structs
from msgspec.structs import replace

from kvcache.core.identity import PAGE_BYTES
from kvcache.store import format as kvc_format
from ops.control import control
from ops.kv_orders import carried_out
from ops.prove.kv_places import MODEL, Place, Tally, document, questions, right_answers, running_place, services_of
from ops.prove.sick_disk import SickDisk
from ops.prove.workplace import Figures, Say, until
from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode
from subjects.messages import Alert

ANSWER_S_MAX = 60.0
"""No answer of the table may take longer, loads included."""
ON_DISK_S_MAX = 30.0
SETTLE_S = 6.0
"""After that a new block has been offered to the disk."""
_SECOND_WORKER = ("worker", "--id", "second", "--device", "cpu:6GiB", "--threads", "1")
_SLOW_SOURCE = ("--kv-rate", "2MiB")
"""So that a migration lasts some seconds, and its source can die meanwhile."""


async def prove_faults(directory: Path, rng: random.Random, say: Say) -> Figures:
    """Files that are damaged, foreign, old or another tenant's, disks that refuse, nodes and Redis killed or frozen."""
    prompt = f"{document(rng, 26)}\n\n{questions(rng, 1)[0]}"
    say("faults: asking vLLM directly")
    right, _ = await right_answers(directory, [prompt])
    tally = Tally(say, right)
    disk = SickDisk(directory)
    await disk.build()
    disk.fail(0)
    alerts: list[str] = []
    control_tally = Tally(lambda _line: None, right)
    services = services_of()
    place_of = running_place(
        directory, tally, services, *_SLOW_SOURCE, environment=disk.environment, more={"second": _SECOND_WORKER}
    )
    async with place_of as place, _heard(place, alerts):
        table = Table(place, prompt, rng, disk)
        await table.start()
        for name, harm in table.rows.items():
            began = len(alerts)
            say(f"faults: {name}")
            await harm()
            table.told[name] = sorted(set(alerts[began:]))
        place.tally = control_tally
        await table.poisoned()
    wanted = {"flipped bit": "kv-corrupt", "full disk": "kv-disk", "read-only disk": "kv-disk"}
    untold = [name for name, kind in wanted.items() if not any(told.startswith(kind) for told in table.told[name])]
    figures = {
        "wrong_text_under_faults": tally.wrong,
        "faults_compared": tally.compared,
        "faults_cached_tokens": tally.cached,
        "faults_alerts": table.told,
        "faults_migration": table.migration,
        "faults_slowest_answer_s": round(tally.slowest_s, 2),
        "faults_slowest_answer": tally.slowest,
    }
    held = {
        "wrong_text_under_faults == 0": tally.wrong == 0,
        f"faults_slowest_answer_s <= {ANSWER_S_MAX:g}": tally.slowest_s <= ANSWER_S_MAX,
        "a migration ends when its source dies": table.migration_ended and table.migration.startswith("failed"),
        "without a fault the disk serves": tally.cached["files alone"] > 0,
        "people were told where due": not untold,
        "pages with other KV and right checksums change the text": control_tally.wrong > 0,
    }
    return figures, held


class Table:
    """The rows, each of which harms something and asks. ``told`` are the kinds of alerts that came with it."""

    def __init__(self, place: Place, prompt: str, rng: random.Random, disk: SickDisk) -> None:
        self._place = place
        self._prompt = prompt
        self._rng = rng
        self._disk = disk
        self._second = ""
        self.told: dict[str, list[str]] = {}
        self.migration = ""
        self.migration_ended = False
        self.rows: dict[str, Callable[[], Awaitable[None]]] = {
            "files alone": lambda: self._with_files("files alone", lambda _file: None),
            "flipped bit": lambda: self._with_files("flipped bit", self._flip),
            "truncated segment": lambda: self._with_files("truncated segment", self._truncate),
            "wrong model's file": lambda: self._with_files("wrong model's file", self._other_model),
            "older version": lambda: self._with_files("older version", self._older),
            "other tenant's page": lambda: self._with_files("other tenant's page", self._other_tenant),
            "full disk": lambda: self._sick("full disk", SickDisk.FULL),
            "node killed": self._node_killed,
            "node frozen": self._node_frozen,
            "source dies mid transfer": self._source_dies,
            "Redis frozen": self._redis_frozen,
            # Last, since a node that said something tells it again a minute later.
            "read-only disk": lambda: self._sick("read-only disk", SickDisk.READ_ONLY),
        }

    # ---------------------------------------------------------------------------------------------------------- files

    def _files(self) -> list[Path]:
        """The segments of the first worker's node."""
        second = self._place.directory / "state" / "second"
        found = self._place.directory.glob(f"**/*{kvc_format.SUFFIX}")
        return sorted(file for file in found if second not in file.parents)

    async def _workers(self) -> list[str]:
        devices = await control(self._place.pool.nats_url, "get", {"what": "devices"})
        return sorted({device["worker"] for device in devices})

    async def start(self) -> None:
        """Computes the prompt once, on the first worker."""
        # Until it is wanted, the second worker has nothing.
        self._second = next(worker for worker in await self._workers() if worker.startswith("second-"))
        await self._place.order("drain", worker=self._second, bound_s=5)
        await self._place.ask("cold", self._prompt)
        await self._on_disk()

    async def _on_disk(self) -> None:
        """Waits until the prompt's blocks are in files, and the files have settled."""
        sizes: list[int] = []

        async def settled() -> bool:
            await asyncio.sleep(1.0)
            sizes.append(sum(file.stat().st_blocks for file in self._files()))
            return len(sizes) > 2 and sizes[-1] > 0 and len(set(sizes[-3:])) == 1

        if not await until(settled, ON_DISK_S_MAX):
            rows = await control(self._place.pool.nats_url, "get", {"what": "kv"})
            raise TimeoutError(f"files do not settle within {ON_DISK_S_MAX:.0f} s: {sizes}; {rows}")

    async def _with_files(self, row: str, harm: Callable[[Path], None]) -> None:
        await self._on_disk()
        await self._place.reload()
        node = await self._place.until_node()
        node.kill()
        for file in self._files():
            harm(file)
        await self._place.until_node(other_than=node.pid)
        await self._place.ask(row, self._prompt)

    def _flip(self, file: Path) -> None:
        """One bit in the payload of each block, so that none can be served."""
        with file.open("r+b") as opened:
            for block in _blocks(file):
                at = kvc_format.page_offset(block.first_slot) + self._rng.randrange(block.payload_bytes)
                opened.seek(at)
                byte = opened.read(1)[0] ^ 1 << self._rng.randrange(8)
                opened.seek(at)
                opened.write(bytes([byte]))

    def _truncate(self, file: Path) -> None:
        size = file.stat().st_size
        os.truncate(file, kvc_format.DATA_OFFSET + self._rng.randrange((size - kvc_format.DATA_OFFSET) // 2))

    def _other_model(self, file: Path) -> None:
        """Another model's file under this one's name, and this one's blocks under the other's header."""
        other = _with_identity(file, signature_model="0" * 16, salt=None)
        file.write_bytes(other)

    def _other_tenant(self, file: Path) -> None:
        file.write_bytes(_with_identity(file, signature_model=None, salt=self._rng.randbytes(16)))

    def _older(self, file: Path) -> None:
        data = bytearray(file.read_bytes())
        struct.pack_into("<H", data, len(kvc_format.MAGIC), kvc_format.VERSION - 1)
        file.write_bytes(data)

    async def poisoned(self) -> None:
        """The control: other numbers under checksums that are right."""

        def poison(file: Path) -> None:
            data = bytearray(file.read_bytes())
            header = kvc_format.decode_header(bytes(data[: kvc_format.HEADER_BYTES]))
            for block in _blocks(file):
                at = kvc_format.page_offset(block.first_slot)
                # Another order of the same numbers: sane values, wrong places.
                payload = bytes(data[at : at + block.payload_bytes])
                half = len(payload) // 2 // 4 * 4
                payload = payload[half:] + payload[:half]
                data[at : at + len(payload)] = payload
                pages = [memoryview(payload)[start : start + PAGE_BYTES] for start in range(0, len(payload), PAGE_BYTES)]
                checksums = kvc_format.pack_checksums([kvc_format.page_checksum(page) for page in pages])
                entries = kvc_format.encode_entries(header, replace(block, checksums=checksums))
                offset = kvc_format.entry_offset(block.first_slot)
                data[offset : offset + len(entries)] = entries
            file.write_bytes(data)

        await self._with_files("poisoned", poison)

    # ------------------------------------------------------------------------------------------------- disks and processes

    async def _sick(self, row: str, number: int) -> None:
        """New text while the disk refuses: it is served from host memory, and computed when that is gone."""
        self._disk.fail(number)
        try:
            await self._place.order("evict-kv", model=MODEL, ratio=1.0)
            await self._place.reload()
            await self._place.ask(f"{row}, computed", self._prompt)
            await asyncio.sleep(SETTLE_S)
            await self._place.reload()
            await self._place.ask(f"{row}, from host memory", self._prompt)
        finally:
            self._disk.fail(0)
        await self._place.ask(row, self._prompt)

    async def _node_killed(self) -> None:
        """In the middle of an answer."""
        await self._place.reload()
        asked = asyncio.create_task(self._place.ask("node killed", self._prompt))
        await asyncio.sleep(self._rng.uniform(0.5, 2.5))
        node = await self._place.until_node()
        node.kill()
        await asked
        await self._place.until_node(other_than=node.pid)

    async def _node_frozen(self) -> None:
        await self._place.reload()
        node = await self._place.until_node()
        node.suspend()
        try:
            await self._place.ask("node frozen", self._prompt, self._prompt)
        finally:
            # Its agent may have ended one that does not answer.
            with contextlib.suppress(psutil.NoSuchProcess):
                node.resume()
        await self._place.ask("node thawed", self._prompt)

    async def _redis_frozen(self) -> None:
        pid = self._place.pool.pid("valkey")
        os.kill(pid, signal.SIGSTOP)
        try:
            await self._place.reload()
            await self._place.ask("Redis frozen", self._prompt, self._prompt)
        finally:
            os.kill(pid, signal.SIGCONT)
        await self._place.ask("Redis thawed", self._prompt)

    async def _source_dies(self) -> None:
        """The second worker pulls at 2 MiB a second when the first worker's node is killed."""
        # The node may be young: a fresh engine writes to it what it lacks.
        await self._place.reload()
        await self._place.ask("before the source dies", self._prompt)
        await self._on_disk()
        (row,) = await self._place.until_ready(1)
        first = row["worker"]
        node = await self._place.until_node()
        second = await self._place.until_node("second")
        assert second.pid != node.pid
        pull = asyncio.create_task(self._migrate(first))
        await asyncio.sleep(1.5)
        node.kill()
        await pull
        await self._place.order("unlock", worker=self._second)
        await self._place.order("drain", worker=first, bound_s=5)
        await self._place.until_elsewhere(first)
        await self._place.ask("source dies mid transfer", self._prompt)
        await self._place.order("unlock", worker=first)
        await self._place.order("drain", worker=self._second, bound_s=5)
        await self._place.until_elsewhere(self._second)
        await self._place.ask("source is back", self._prompt)

    async def _migrate(self, source: str) -> None:
        # The command may end well or say that the source is gone; what counts is that it ends.
        argument = {"model": MODEL, "source": source, "target": self._second, "timeout_s": ANSWER_S_MAX}
        ended = await carried_out("migrate-kv", argument, ANSWER_S_MAX, self._place.pool.nats_url, quiet=True)
        for row in ended["transactions"]:
            self.migration = row["outcome"]
            self._place.tally.say(f"source dies mid transfer: {row['outcome']}")
            self.migration_ended = row["ended"]


def _blocks(file: Path) -> list[kvc_format.BlockEntry]:
    data = file.read_bytes()
    header = kvc_format.decode_header(data[: kvc_format.HEADER_BYTES])
    entries = data[kvc_format.HEADER_BYTES : kvc_format.DATA_OFFSET]
    return kvc_format.decode_entries(header, entries, len(data)).blocks


def _with_identity(file: Path, *, signature_model: str | None, salt: bytes | None) -> bytes:
    """The file as one of another model or another salt, with every checksum right."""
    data = bytearray(file.read_bytes())
    header = kvc_format.decode_header(bytes(data[: kvc_format.HEADER_BYTES]))
    identity = header.identity
    if signature_model is not None:
        signature = structs.replace(identity.signature, model=signature_model + identity.signature.model[16:])
        identity = structs.replace(identity, signature=signature, weights_hash="0" * 64)
    if salt is not None:
        identity = structs.replace(identity, salt=salt)
    other = structs.replace(header, identity=identity)
    blocks = _blocks(file)
    data[: kvc_format.HEADER_BYTES] = other.encoded
    for block in blocks:
        entries = kvc_format.encode_entries(other, block)
        offset = kvc_format.entry_offset(block.first_slot)
        data[offset : offset + len(entries)] = entries
    return bytes(data)


@contextlib.asynccontextmanager
async def _heard(place: Place, alerts: list[str]) -> AsyncIterator[None]:
    """Kinds of alerts, as they come."""
    from subjects.nats.bus import NatsBus

    def hear(message: BusMessage) -> None:
        alerts.append(decode(message.payload, Alert).kind)

    bus = await NatsBus.connect([place.pool.nats_url], name="carpool-proof")
    try:
        await bus.subscribe(names.ALL_ALERTS, hear)
        yield
    finally:
        await bus.close()
