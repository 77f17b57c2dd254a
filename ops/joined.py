"""Servers that somebody else runs: what is wrong with a given ``--nats`` is told in one line, before anything starts."""

from __future__ import annotations

from subjects import names
from subjects.errors import BusError, ConfigError, NoResponders

PAYLOAD_BYTES_MIN = 1024 * 1024
"""NATS's own default. A part of a grant holds up to 256 KiB of body; the pool's digest grows."""
CONNECT_S_MAX = 5.0
LOOK_S_MAX = 1.0


def bus_urls(nats_url: str) -> list[str]:
    """The servers of one ``--nats``: commas stand between those of a cluster."""
    return [url.strip() for url in nats_url.split(",") if url.strip()]


async def check_nats(nats_url: str, *, must_answer: bool = True) -> None:
    """Whether a pool can live on this server. With ``must_answer=False`` a server that does not answer now is fine: a part
    that is started alone waits for its bus.

    Raises:
        ConfigError: it cannot be reached, has no JetStream, or takes too small messages; with the remedy.
    """
    from subjects.nats.bus import NatsBus

    timeout_s = CONNECT_S_MAX if must_answer else LOOK_S_MAX
    try:
        bus = await NatsBus.connect(bus_urls(nats_url), name="carpool-check", timeout_s=timeout_s)
    except (BusError, ValueError) as error:
        if not must_answer and isinstance(error, BusError):
            return
        raise ConfigError(f"--nats: {error}; check the address, or leave it out and a server is started here") from None
    try:
        if bus.payload_bytes_max < PAYLOAD_BYTES_MIN:
            raise ConfigError(
                f"--nats: the server takes messages of {bus.payload_bytes_max} bytes, and the pool needs "
                f"{PAYLOAD_BYTES_MIN}; raise max_payload in its configuration"
            )
        try:
            await bus.kv_get(names.MODELS_BUCKET, "-")
        except NoResponders:
            raise ConfigError("--nats: the server has no JetStream; start it with -js, or with a jetstream block") from None
        except BusError as error:
            if not must_answer:
                return
            raise ConfigError(f"--nats: {error}; the pool needs JetStream with memory and file storage") from None
    finally:
        await bus.close()
