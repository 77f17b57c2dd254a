"""A recording of what a scheduler core heard and ordered, and its replay through a fresh core.

A file holds one or more runs (a scheduler that is started again goes on in the same file). Each run begins with a
:class:`RunBegan` and goes on with a :class:`RecordedStep` per event; every record is MessagePack after its length in four
bytes. Commands are kept as hashes, commands to workers also whole, so that a difference can be shown. No event has a prompt
or an answer in it.

The core is pure and its clock is in the recording, so a replay through the same version must order the very same; through
another version it shows what that would have done differently, up to the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
import structlog

from broker.core.plan.policy import Policy
from broker.core.pool.events import SchedulerCommand, SchedulerEvent, SchedulerSettings, SendCommand, Ticked
from broker.core.scheduler import SchedulerCore
from subjects.errors import ConfigError

FORMAT = 1
RECORD_BYTES_MAX = 1 << 30
"""No single record is longer; what claims to be is damage."""
FLUSH_EVERY_STEPS = 50
"""Ticks come ten times a second, so a scheduler that is killed loses a few seconds of its recording at most."""
_LENGTH_BYTES = 4

log = structlog.get_logger(__name__)

_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(SchedulerEvent)}


class RunBegan(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """A scheduler process began to record."""

    format: int
    version: str
    """Of Carpool."""
    policy: str
    settings: SchedulerSettings


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One event and what the core ordered in answer."""

    now_s: float
    event: str
    body: msgspec.Raw
    commands: tuple[str, ...]
    """Kind and hash of each, in order."""
    orders: tuple[msgspec.Raw, ...] = ()
    """The commands to workers among them."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RunBegan | RecordedStep)


def _command_key(command: SchedulerCommand) -> str:
    return f"{type(command).__name__} {hashlib.blake2b(_encoder.encode(command), digest_size=8).hexdigest()}"


class Recorder:
    """Writes a recording. Whatever goes wrong ends the recording and not the scheduler."""

    def __init__(self, path: Path, policy: str, settings: SchedulerSettings, bytes_max: int) -> None:
        """Opens the file, or goes on after the last whole record of one that is there.

        Raises:
            ConfigError: it cannot be written, or is no recording.
        """
        self._path = path
        self._bytes_max = bytes_max
        self._steps = 0
        self._file: BinaryIO | None
        try:
            whole_bytes = _whole_bytes(path) if path.exists() else 0
            self._file = path.open("r+b" if whole_bytes else "wb")
            self._file.truncate(whole_bytes)
            self._bytes = self._file.seek(whole_bytes)
        except OSError as error:
            raise ConfigError(f"{path}: the recording cannot be written ({error.strerror})") from None
        self._write(RunBegan(format=FORMAT, version=_version(), policy=policy, settings=settings))
        self.flush()

    def step(self, now_s: float, event: SchedulerEvent, commands: Sequence[SchedulerCommand]) -> None:
        """Keeps one step."""
        if self._file is None:
            return
        self._write(
            RecordedStep(
                now_s=now_s,
                event=type(event).__name__,
                body=msgspec.Raw(_encoder.encode(event)),
                commands=tuple(_command_key(command) for command in commands),
                orders=tuple(
                    msgspec.Raw(_encoder.encode(command)) for command in commands if isinstance(command, SendCommand)
                ),
            )
        )
        self._steps += 1
        if commands or isinstance(event, Ticked) or self._steps % FLUSH_EVERY_STEPS == 0:
            self.flush()

    def _write(self, record: RunBegan | RecordedStep) -> None:
        payload = _encoder.encode(record)
        if self._bytes + len(payload) + _LENGTH_BYTES > self._bytes_max:
            self._end(f"it has reached its bound of {self._bytes_max} bytes")
            return
        assert self._file is not None
        try:
            self._file.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
        except OSError as error:
            self._end(str(error.strerror))
            return
        self._bytes += len(payload) + _LENGTH_BYTES

    def flush(self) -> None:
        """Hands what is buffered to the operating system."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._end(str(error.strerror))

    def _end(self, reason: str) -> None:
        log.warning("the recording ends here", path=str(self._path), reason=reason)
        self.close()

    def close(self) -> None:
        """Ends it; calling again does nothing."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("the end of the recording is lost", path=str(self._path), reason=error.strerror)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("carpool")
    except PackageNotFoundError:
        return ""


def _whole_bytes(path: Path) -> int:
    """Up to the end of the last whole record.

    Raises:
        ConfigError: the file is no recording.
    """
    end = 0
    with path.open("rb") as file:
        for payload, end_bytes in _frames(file):
            if end == 0:
                _first(path, payload)
            end = end_bytes
    if end == 0 and path.stat().st_size:
        raise ConfigError(f"{path}: is no recording of a scheduler; name another file")
    return end


def _first(path: Path, payload: bytes) -> None:
    try:
        first = _decoder.decode(payload)
    except msgspec.MsgspecError:
        first = None
    if not isinstance(first, RunBegan):
        raise ConfigError(f"{path}: is no recording of a scheduler; name another file")


def _frames(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Whole records with the offset after each; a cut or damaged end is left out."""
    while True:
        head = file.read(_LENGTH_BYTES)
        length = int.from_bytes(head, "big")
        if len(head) < _LENGTH_BYTES or length > RECORD_BYTES_MAX:
            return
        payload = file.read(length)
        if len(payload) < length:
            return
        yield payload, file.tell()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step of a run in which the core ordered something else than it did then."""

    run: int
    step: int
    now_s: float
    event: str
    recorded: tuple[str, ...]
    replayed: tuple[str, ...]
    recorded_orders: tuple[str, ...]
    replayed_orders: tuple[str, ...]


@dataclass(slots=True)
class Replay:
    """What a replay found."""

    runs: int = 0
    steps: int = 0
    commands: int = 0
    orders: int = 0
    """Commands to workers, of ``commands``."""
    differences: list[Difference] = field(default_factory=list)
    """At most one per run: what follows a difference is another history."""


def replay(path: Path, make_policy: Callable[[str], Policy]) -> Replay:
    """Feeds every recorded event to a fresh core and compares what it orders.

    Raises:
        ConfigError: the file cannot be read, is no recording, or holds events that this version does not know.
    """
    found = Replay()
    core: SchedulerCore | None = None
    step = 0
    try:
        with path.open("rb") as file:
            for payload, _ in _frames(file):
                if found.runs == 0:
                    _first(path, payload)
                record = _decoder.decode(payload)
                if isinstance(record, RunBegan):
                    if record.format != FORMAT:
                        raise ConfigError(f"{path}: recorded in format {record.format}, this version reads {FORMAT}")
                    found.runs += 1
                    step = 0
                    core = SchedulerCore(record.settings, make_policy(record.policy))
                elif core is not None:
                    step += 1
                    if (difference := _replay_step(found, core, record, step)) is not None:
                        found.differences.append(difference)
                        core = None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, KeyError) as error:
        where = f"run {found.runs}, step {step + 1}"
        raise ConfigError(f"{path}: {where} cannot be read by this version ({type(error).__name__}: {error})") from None
    if not found.runs:
        raise ConfigError(f"{path}: is empty, so it is no recording of a scheduler")
    return found


def _replay_step(found: Replay, core: SchedulerCore, record: RecordedStep, step: int) -> Difference | None:
    event = msgspec.msgpack.decode(record.body, type=_EVENTS[record.event])
    commands = core.step(record.now_s, event)
    keys = tuple(_command_key(command) for command in commands)
    found.steps += 1
    found.commands += len(keys)
    found.orders += len(record.orders)
    if keys == record.commands:
        return None
    sent = [command for command in commands if isinstance(command, SendCommand)]
    return Difference(
        run=found.runs,
        step=step,
        now_s=record.now_s,
        event=record.event,
        recorded=record.commands,
        replayed=keys,
        recorded_orders=tuple(msgspec.json.encode(msgspec.msgpack.decode(order)).decode() for order in record.orders),
        replayed_orders=tuple(msgspec.json.encode(command).decode() for command in sent),
    )
