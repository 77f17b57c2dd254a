"""What a request may say in its headers, over HTTP and NATS alike.

================================  =====================================================================
``X-Business-Id``                 the business line, for breakers and the ledger
``X-Chain-Id``                    links the steps of one job
``X-Environment``                 ``production`` unless said otherwise
``X-Request-Kind``                a value of :class:`subjects.messages.RequestKind`
``X-Timeout-S``                   the client's own deadline, within the gateway's
``X-Carpool-Tags``                capabilities that ``auto`` must find, separated by commas
``X-Carpool-Quality-Tier-Min``    the lowest quality tier that ``auto`` may choose
================================  =====================================================================
"""

from __future__ import annotations

from broker.api.openai_bodies import ParsedBody, formatted
from broker.core.requests.admission import Wish
from broker.gateway.exchange import Ask
from subjects.errors import ApiError
from subjects.messages import TASK_OF, RequestKind

HEADER_LENGTH_MAX = 128


def header(ask: Ask, name: str) -> str:
    """A client's word in a header, cut to a bound and to printable ASCII: it travels in every ticket."""
    text = ask.headers.get(name, "")[:HEADER_LENGTH_MAX]
    return text if text.isascii() and text.isprintable() else ""


def request_kind(ask: Ask) -> RequestKind:
    text = header(ask, "x-request-kind")
    if not text:
        return RequestKind.INFERENCE
    try:
        return RequestKind(text)
    except ValueError:
        kinds = ", ".join(kind.value for kind in RequestKind)
        raise ApiError(400, f"The header 'X-Request-Kind' must be one of: {kinds}.", code="invalid_value") from None


def wish_of(ask: Ask, body: ParsedBody) -> Wish:
    """What an ``auto`` request needs: tags by what its body uses and by the header ``X-Carpool-Tags: a, b``."""
    tags = [tag.strip() for tag in header(ask, "x-carpool-tags").split(",") if tag.strip()]
    if body.asked.tools:
        tags.append("tools")
    if formatted(body.fields):
        tags.append("structured")
    tier = header(ask, "x-carpool-quality-tier-min")
    if tier and not tier.isdigit():
        raise ApiError(400, "The header 'X-Carpool-Quality-Tier-Min' must be a whole number.", code="invalid_value")
    return Wish(tuple(sorted(set(tags))), int(tier or 0), TASK_OF[ask.endpoint])


def timeout_s_of(ask: Ask) -> float | None:
    """The client's own deadline in seconds from arrival, if it gave one."""
    text = ask.headers.get("x-timeout-s", "")
    if not text:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s < float("inf"):
        raise ApiError(400, "The header 'X-Timeout-S' must be a number of seconds above 0.", code="invalid_value")
    return timeout_s
