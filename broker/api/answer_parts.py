"""An answer as a row of parts: reasoning, text and calls of tools, one after the other.

Chat answers in OpenAI's shape mix these in one message. Other APIs number them and say when each begins and ends; what is
here tells that apart, once for all of them and the same for streams and whole answers.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from broker.api.openai_answers import KEEP_ALIVE, AnswerHead, OpenAiWriter, detail_of
from subjects.errors import ApiError
from subjects.messages import Delta, Usage

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Kind(Enum):
    """What a part is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """One part, as far as it has come. ``texts`` of a call are its arguments, JSON in pieces."""

    index: int
    """Its place in the row; -1 until it opens."""
    kind: Kind
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """Of a text, where they were asked for: entries as in a chat's ``logprobs.content``."""

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)


class Opened(msgspec.Struct, frozen=True):
    """A part begins."""

    part: Part


@dataclass(slots=True)  # one for each token: a frozen one takes three times as long to make
class Grew:
    """A part has more; ``logprobs`` belong to the tokens of ``text``."""

    part: Part
    text: str
    logprobs: tuple[Any, ...] = ()


class Closed(msgspec.Struct, frozen=True):
    """A part is complete."""

    part: Part


Change = Opened | Grew | Closed


@dataclass(eq=False, slots=True)
class AnswerParts:
    """Tells the parts of one choice apart. One part is open at a time.

    What else comes while a call is open waits for the call's end: some models write white space between the arguments, and
    some engines write several calls at once, a piece of each in turn. A call ends where its arguments are a whole JSON
    object and another call or reasoning is next, or with the answer.
    """

    _request: str
    parts: list[Part] = field(default_factory=list)
    """All that were opened, in order."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _open: Part | None = None
    _calls: dict[int, Part] = field(default_factory=dict)
    _waiting: list[tuple[Kind, str]] = field(default_factory=list)
    """What was written while a call is open."""
    _held: list[Part] = field(default_factory=list)
    """Calls that began while another is open, with what has come of them."""
    _logprobs: list[Any] = field(default_factory=list)

    @property
    def calls(self) -> list[Part]:
        """The calls among the parts."""
        return [part for part in self.parts if part.kind is Kind.CALL]

    def add(self, deltas: Iterable[Delta]) -> list[Change]:
        """What the next deltas change. Only choice 0 counts: these APIs know no other."""
        changes: list[Change] = []
        for delta in deltas:
            if delta.choice != 0:
                continue
            detail = detail_of(delta)
            if detail:
                self._keep_logprobs(detail)
                reasoning = detail.get("reasoning") or detail.get("reasoning_content")
                if isinstance(reasoning, str) and reasoning:
                    if self._call_is_open() and not _is_whole(self._open):
                        self._waiting.append((Kind.REASONING, reasoning))
                    else:
                        self._write(changes, Kind.REASONING, reasoning)
            if delta.text:
                if self._call_is_open():
                    self._waiting.append((Kind.TEXT, delta.text))
                else:
                    self._write(changes, Kind.TEXT, delta.text)
            calls = detail.get("tool_calls")
            for piece in calls if isinstance(calls, list) else ():
                if isinstance(piece, dict):
                    self._call(changes, piece)
            if delta.finish_reason is not None:
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        return changes

    def end(self) -> list[Change]:
        """What the end of the answer changes."""
        changes: list[Change] = []
        self._close(changes)
        while self._held:
            self._begin_held(changes)
            self._close(changes)
        return changes

    def _keep_logprobs(self, detail: dict[str, Any]) -> None:
        logprobs = detail.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        if isinstance(entries, list):
            self._logprobs += entries

    def _write(self, changes: list[Change], kind: Kind, text: str) -> None:
        part = self._open
        if part is None or part.kind is not kind:
            self._close(changes)
            part = self._begin(changes, Part(len(self.parts), kind))
        logprobs: tuple[Any, ...] = ()
        if kind is Kind.TEXT and self._logprobs:
            logprobs = tuple(self._logprobs)
            part.logprobs += logprobs
        self._logprobs.clear()
        part.texts.append(text)
        changes.append(Grew(part, text, logprobs))

    def _call(self, changes: list[Change], piece: dict[str, Any]) -> None:
        place = piece.get("index")
        place = place if isinstance(place, int) else len(self._calls)
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        arguments = arguments if isinstance(arguments, str) else ""
        if (part := self._calls.get(place)) is None:
            given = piece.get("id")
            call_id = given if isinstance(given, str) and given else f"call_{self._request}_{place}"
            part = self._calls[place] = Part(-1, Kind.CALL, name if isinstance(name, str) else "", call_id)
            self._held.append(part)
        if not arguments:
            pass
        elif part is self._open:
            part.texts.append(arguments)
            changes.append(Grew(part, arguments))
        elif part.index < 0:
            part.texts.append(arguments)
        # Else it is closed, since it was whole: nothing but white space can follow.
        while self._held and (not self._call_is_open() or _is_whole(self._open)):
            self._close(changes)
            self._begin_held(changes)

    def _call_is_open(self) -> bool:
        return self._open is not None and self._open.kind is Kind.CALL

    def _begin_held(self, changes: list[Change]) -> None:
        part = self._held.pop(0)
        part.index = len(self.parts)
        self._begin(changes, part)
        if part.texts:
            changes.append(Grew(part, part.text))

    def _begin(self, changes: list[Change], part: Part) -> Part:
        self.parts.append(part)
        self._open = part
        changes.append(Opened(part))
        return part

    def _close(self, changes: list[Change]) -> None:
        part, self._open = self._open, None
        if part is not None:
            changes.append(Closed(part))
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for kind, texts in itertools.groupby(waiting, key=lambda one: one[0]):
                self._write(changes, kind, "".join(text for _, text in texts))
            self._close(changes)


def _is_whole(call: Part | None) -> bool:
    """Whether the arguments are a JSON object to its end."""
    if call is None or not next((text for text in reversed(call.texts) if text.strip()), "").rstrip().endswith("}"):
        return False
    try:
        return isinstance(_decode(call.text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False


class PartsWriter(ABC):
    """Writes one answer of an API that numbers parts: either a stream, or all of it at once."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._parts = AnswerParts(head.request)
        self._opened = False

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The stream's events for the next deltas; the first call also opens the stream."""
        return self._told(self._parts.add(deltas))

    def quiet(self) -> bytes:
        """What keeps a stream's connection open while nothing happens."""
        return KEEP_ALIVE

    def end(self, usage: Usage | None) -> bytes:
        """The last events of a stream: of the last part, and of the answer."""
        return self._told(self._parts.end()) + self._last(usage)

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """The last events of a stream that broke."""

    def whole(self, deltas: Sequence[Delta], usage: Usage | None) -> bytes:
        """The whole answer as JSON.

        Raises:
            ApiError: 502, the answer cannot be told in this API.
        """
        self._parts.add(deltas)
        self._parts.end()
        return _encode(self._whole(usage))

    def _told(self, changes: Iterable[Change]) -> bytes:
        opening = b"" if self._opened else self._opening()
        self._opened = True
        return opening + b"".join([self._changed(change) for change in changes])

    @abstractmethod
    def _opening(self) -> bytes: ...

    @abstractmethod
    def _changed(self, change: Change) -> bytes: ...

    @abstractmethod
    def _last(self, usage: Usage | None) -> bytes: ...

    @abstractmethod
    def _whole(self, usage: Usage | None) -> dict[str, Any]: ...


AnswerWriter = OpenAiWriter | PartsWriter


class Translation(msgspec.Struct, frozen=True):
    """A request as the body that the pool gets, and what writes its answer."""

    body: bytes
    writer: Callable[[AnswerHead, int], AnswerWriter]
    """By the answer's head and the gateway's own count of the prompt's tokens."""
