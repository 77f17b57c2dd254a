"""A model that was applied a moment ago is known, although the news of it has not arrived (B3)."""

from __future__ import annotations

import asyncio

from subjects import names
from subjects.codec import encode
from subjects.nats.kv import KvWatch
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import open_pool, record


async def test_a_name_is_unknown_only_after_the_bucket_was_asked(shared_nats_server: NatsServer) -> None:
    """By name and by alias, for many at once; a name that nobody applied stays a 404."""
    async with open_pool(shared_nats_server.url) as pool:
        await pool.register(record("before"))
        for subscription in pool.gateway._subscriptions:
            if isinstance(subscription, KvWatch):
                await subscription.stop()
        model = record("just-applied", aliases=("by-alias",))
        await pool.bus.kv_put(names.MODELS_BUCKET, model.name, encode(model))
        await pool.replica(model)
        asked = ("just-applied", "by-alias", "never-applied", "just-applied")
        answers = await asyncio.gather(*(pool.chat(name) for name in asked))
        assert [answer.status_code for answer in answers] == [200, 200, 404, 200]
        told = pool.gateway._registry_changes
        pool.gateway._subscriptions.append(await pool.bus.kv_watch(names.MODELS_BUCKET, pool.gateway._on_record))
        await until(lambda: pool.gateway._registry_changes >= told + 2, "the watch works again")
        await pool.bus.kv_delete(names.MODELS_BUCKET, model.name)
