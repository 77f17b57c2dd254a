"""What people's commands make of the name of a LoRA adapter (ING-3, SCH-11)."""

from __future__ import annotations

from pathlib import Path

from subjects.codec import decode, encode
from subjects.messages import Adapter, ControlReply, ControlRequest
from subjects.names import control
from tests.core.scheduler_world import record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.test_scheduler import rig_on


def adapter(name: str, *aliases: str) -> Adapter:
    """An adapter."""
    return Adapter(name=name, aliases=aliases, source=name, adapter_hash=name)


async def test_an_adapter_is_explained_and_never_deleted_as_its_base(nats_server: NatsServer, tmp_path: Path) -> None:
    """Why an adapter does not answer is why its base does not; a command that changes a model must name the model."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a", adapters=(adapter("sql", "team/sql"),)))
        for name in ("sql", "team/sql"):
            told = await rig.control("explain", {"what": name})
            assert (told["explains"], told["model"]) == ("model", "a")
        request = encode(ControlRequest(argument=b'{"model": "sql"}'))
        reply = decode(await rig.bus.request(control("delete"), request, timeout_s=5.0), ControlReply)
        assert reply.error == "delete: model: 'sql' is an adapter of 'a'; name that model, or change its spec.adapters"
        assert [row["name"] for row in await rig.control("get", {"what": "models"})] == ["a"]


async def test_names_that_do_nothing_are_noted_at_apply(nats_server: NatsServer, tmp_path: Path) -> None:
    """An adapter hidden by a model or by another model's adapter; an adapter may be a fallback."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        rows = await rig.apply(
            record("a", adapters=(adapter("x"), adapter("y"))),
            record("b", adapters=(adapter("a"), adapter("x"), adapter("z"))),
            record("c", fallback="y"),
        )
        assert [row["note"].split("; ")[-2:] for row in rows] == [
            [""],
            ["its adapter 'a' is hidden by 'a'", "its adapter 'x' is hidden by 'a'"],
            [""],
        ]
