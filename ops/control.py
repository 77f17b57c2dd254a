"""Asking the scheduler: the client side of ``ctl.<verb>``."""

from __future__ import annotations

from typing import Any

import msgspec

from ops.joined import bus_urls
from subjects import codec, names
from subjects.errors import CarpoolError, NoResponders, RequestTimeout
from subjects.messages import ControlReply, ControlRequest

TIMEOUT_S = 5.0


async def control(nats_url: str, verb: str, argument: object, *, timeout_s: float = TIMEOUT_S) -> Any:
    """One verb on a connection of its own.

    Raises:
        CarpoolError: the scheduler's own refusal, or one line that says who does not answer.
    """
    from subjects.nats.bus import NatsBus

    bus = await NatsBus.connect(bus_urls(nats_url), name="carpool-cli")
    try:
        payload = codec.encode(ControlRequest(argument=msgspec.json.encode(argument)))
        try:
            answer = await bus.request(names.control(verb), payload, timeout_s=timeout_s)
        except NoResponders:
            raise CarpoolError("no scheduler answers on this bus: run `carpool scheduler` or `carpool up`") from None
        except RequestTimeout:
            raise CarpoolError(f"the scheduler did not answer `{verb}` within {timeout_s:.0f} s: try again") from None
    finally:
        await bus.close()
    reply = codec.decode(answer, ControlReply)
    if reply.error:
        raise CarpoolError(reply.error)
    return msgspec.json.decode(reply.result)
