"""``carpool explain`` and the recording of a live scheduler, on a real nats-server (SCH-8, SCH-11)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from broker.gateway.recent_requests import RecentRequests
from broker.scheduler.policies import make_policy
from broker.scheduler.recording import replay
from broker.scheduler.shell import Scheduler, SchedulerConfig
from ops.cli import main
from profiles.registry import Registry
from subjects import names
from subjects.bus import BusMessage
from subjects.codec import encode
from subjects.ids import IngressId, ReplicaId, RequestId
from subjects.messages import Endpoint, Lane, RequestProfile, RequestStory, SlaClass
from subjects.nats.bus import NatsBus
from tests.core.scheduler_world import deployment, model_hash, record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.test_scheduler import QUICK, rig_on


def told(server: NatsServer, *words: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(main, [*words, "--nats", server.url])
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_a_model_a_scale_action_and_a_request_are_explained(nats_server: NatsServer, tmp_path: Path) -> None:
    """From demand to eviction: why, what would change it; each step with its time; a request's attempts."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a", aliases=("first",)), record("b"), record("huge", 9.0))
        await until(lambda: bool(scheduler.core.pool.devices(usable=True)), "the device is known")
        cold = await rig.control("explain", {"what": "first"})
        assert (cold["explains"], cold["model"], cold["state"]) == ("model", "a", "unloaded")
        assert cold["why"] == ["nothing was decided about it yet"]
        assert cold["would_change"] == ["a request: it is loaded, 1.0 GiB are free on " + f"{rig.agent.worker}/cpu0"]
        await until(lambda: rig.digest is not None and any(m.refusal for m in rig.digest.models), "the digest refuses")
        huge = await rig.control("explain", {"what": "huge"})
        assert huge["state"] == "refused" and "needs 9.0 GiB" in huge["why"][0]
        rig.waiting = {"a": 2}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        rig.waiting = {"b": 1}
        await until(lambda: rig.agent.ready == ["b"], "b is loaded")
        await until(lambda: not scheduler.core.transactions.running, "the transaction is over")
        gone = await rig.control("explain", {"what": "a"})
        assert [(entry["action"], entry["outcome"]) for entry in gone["actions"]] == [("evict", "done"), ("load", "done")]
        assert "makes room for b" in gone["why"][0]
        there = await rig.control("explain", {"what": "b"})
        (replica,) = there["replicas"]
        assert replica["state"] == "ready" and there["waiting"] == 1
        assert (await rig.control("explain", {"what": replica["replica"]}))["model"] == "b"
        action = await rig.control("explain", {"what": there["transactions"][0]["transaction"]})
        assert (action["kind"], action["model"], action["outcome"]) == ("place", "b", "done")
        assert [step["what"].split()[0] for step in action["steps"]] == ["drain", "unload", "load"]
        assert all(step["outcome"] == "done" and step["took_s"] >= 0 for step in action["steps"])
        assert [step["sent_s"] for step in action["steps"]] == sorted(step["sent_s"] for step in action["steps"])
        by_operation = await rig.control("explain", {"what": action["steps"][1]["operation"]})
        assert by_operation["transaction"] == action["transaction"]
        await rig.control("lock", {"model": "b"})
        await rig.control("mode", {"model": "b", "mode": "observe"})
        locked = await rig.control("explain", {"what": "b"})
        assert any("a person locked it" in line for line in locked["why"])
        assert locked["would_change"][:2] == [
            "`carpool unlock b`: the scheduler decides about it again",
            "`carpool mode b act`: what the policy decides is carried out",
        ]

        recent = RecentRequests()
        request = RequestId("gateway-0123456789-3")
        profile = RequestProfile(
            deployment=deployment("b"),
            model_hash=model_hash("b"),
            endpoint=Endpoint.CHAT,
            tenant="t",  # type: ignore[arg-type]
            max_tokens=9,
            input_tokens=12,
            expected_output_tokens=7,
            kv_pages_needed=1,
            deadline_unix_s=0.0,
        )
        recent.arrived(request, "b", profile, 100.0, 1_900_000_000.0)
        recent.granted(request, 1, ReplicaId("b-1"), 0.5)
        recent.restarted(request)
        recent.granted(request, 2, ReplicaId("b-2"), 0.25)

        async def answer(message: BusMessage) -> None:
            story = recent.story(RequestId(message.payload.decode()), 102.0)
            await rig.bus.publish(message.reply, encode(story))

        await rig.bus.subscribe(
            names.why(IngressId("gateway-0123456789")), lambda message: tasks.append(asyncio.create_task(answer(message)))
        )
        tasks: list[asyncio.Task[None]] = []
        story = await rig.control("explain", {"what": f"chatcmpl-{request}"})
        assert [(one["replica"], one["lost"]) for one in story["attempts"]] == [("b-1", True), ("b-2", False)]
        assert (story["explains"], story["state"], story["model"]) == ("request", "running", "b")
        waiting = RequestId("gateway-0123456789-4")
        recent.arrived(waiting, "a", profile, 101.0, 1_900_000_001.0)
        story = await rig.control("explain", {"what": waiting})
        assert (story["state"], story["model_state"]) == ("waiting", "refused")  # b is locked, and holds the room
        assert "requests are refused" in story["waits_for"][0] and "makes room for b" in story["waits_for"][1]
        assert "its model  a is refused" in await asyncio.to_thread(told, nats_server, "explain", waiting)
        # The command says the same in words; run beside the loop, since it brings a loop of its own.
        words = await asyncio.to_thread(told, nats_server, "explain", "b")
        assert "b: ready, class silver" in words and "a person locked it" in words and "carpool explain 1-" in words
        words = await asyncio.to_thread(told, nats_server, "explain", action["transaction"])
        assert "place b on" in words and "drain a-" in words and ": done in" in words
        words = await asyncio.to_thread(told, nats_server, "explain", request)
        assert "attempt 2  waited 0.25 s, ran on b-2" in words and "then that replica was lost" in words
        assert json.loads(await asyncio.to_thread(told, nats_server, "explain", "b", "--json"))["model"] == "b"
        assert "b: unlocked" in await asyncio.to_thread(told, nats_server, "unlock", "b")
        assert "was neither locked nor drained" in await asyncio.to_thread(told, nats_server, "unlock", "b")
        assert "mode act" in await asyncio.to_thread(told, nats_server, "mode", "b", "default")
        words = await asyncio.to_thread(told, nats_server, "drain", "--replica", replica["replica"], "--bound-s", "1")
        assert "draining, 1 replica with" in words


@pytest.mark.parametrize(
    "words",
    [
        ["lock"],
        ["lock", "a", "--device", "x/y"],
        ["drain", "--bound-s", "3"],
        ["drain", "--worker", "w", "--bound-s", "nan"],
        ["mode", "a", "off"],
    ],
)
def test_a_command_that_names_nothing_or_too_much(words: list[str]) -> None:
    """Exit code 2 and how to use it."""
    result = CliRunner().invoke(main, [*words, "--nats", "nats://127.0.0.1:9"])
    assert result.exit_code == 2 and "Usage" in result.stderr


async def test_a_recording_of_a_live_scheduler_replays_the_same(nats_server: NatsServer, tmp_path: Path) -> None:
    """Loads, an eviction, locks, a drain, and questions of people in between (issue B)."""
    path = tmp_path / "decisions.rec"
    async with rig_on(nats_server, tmp_path) as rig:
        bus = await NatsBus.connect([rig.url], name="s", wait=True)
        registry = Registry(tmp_path / "s" / "registry.sqlite")
        config = SchedulerConfig(
            nats_urls=(rig.url,), state_dir=tmp_path / "s", settings=QUICK, policy="carpool", record=path
        )
        scheduler = Scheduler(bus, registry, config)
        rig._schedulers.append((scheduler, bus, registry))
        await scheduler.start()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a"), record("b"), record("huge", 9.0))
        rig.agent.broken.add("b")
        for name in ("a", "b", "a"):
            rig.waiting = {name: 1}
            for what in ("models", "replicas", "devices", "queues", "timeline"):
                await rig.control("get", {"what": what})
            for what in ("a", "b", "huge"):
                await rig.control("explain", {"what": what})
            await asyncio.sleep(0.8)
        await rig.control("lock", {"model": "a"})
        await rig.control("drain", {"worker": "w"})
        await rig.control("unload", {"model": "a"})
        await asyncio.sleep(0.5)
        steps = scheduler.core.digests.latest
        assert steps is not None
        await rig.end(scheduler)
    found = replay(path, make_policy)
    assert found.differences == [] and found.runs == 1 and found.orders >= 3 and found.commands > 20
    result = await asyncio.to_thread(CliRunner().invoke, main, ["replay-scheduler", str(path), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["same"] is True
    result = await asyncio.to_thread(CliRunner().invoke, main, ["replay-scheduler", str(path)])
    assert result.exit_code == 0 and "the same again" in result.stdout


def test_a_gateway_remembers_numbers_of_its_requests() -> None:
    """Each way a request can go, bounded; what it never knew or has forgotten it says (SCH-11)."""
    recent = RecentRequests(ended_max=2)
    profile = msgspec.convert(
        {
            "deployment": deployment("m"),
            "model_hash": model_hash("m"),
            "endpoint": "chat",
            "tenant": "t",
            "max_tokens": 9,
            "input_tokens": 12,
            "expected_output_tokens": 7,
            "kv_pages_needed": 1,
            "deadline_unix_s": 0.0,
            "sla_class": "gold",
            "lane": "m",
        },
        RequestProfile,
    )
    one, two, three = (RequestId(f"g-{number}") for number in (1, 2, 3))
    assert recent.story(one, 1.0) == RequestStory(request=one, known=False)
    for request in (one, two, three):
        recent.arrived(request, "m", profile, 10.0, 1000.0)
    waiting = recent.story(one, 12.5)
    assert (waiting.state, waiting.age_s, waiting.attempts, waiting.first_output_s) == ("waiting", 2.5, (), None)
    assert (waiting.sla_class, waiting.lane, waiting.model) == (SlaClass.GOLD, Lane.MEDIUM, "m")
    recent.restarted(one)  # before any grant: a busy engine's answer
    recent.granted(one, 2, ReplicaId("r-1"), 3.0)
    recent.first_output(one, 14.0)
    assert (recent.story(one, 15.0).state, recent.story(one, 15.0).first_output_s) == ("running", 4.0)
    recent.ended(one, 16.0, status=200, output_tokens=5)
    ended = recent.story(one, 99.0)
    assert (ended.state, ended.age_s, ended.status, ended.output_tokens) == ("ended", 6.0, 200, 5)
    recent.ended(one, 17.0, status=500)
    assert recent.story(one, 99.0) == ended
    for attempt, begun in ((1, False), (2, True)):
        recent.granted(two, attempt, ReplicaId(f"r-{attempt}"), 0.1)
        recent.restarted(two, begun=begun)
    assert [(once.lost, once.begun) for once in recent.story(two, 16.0).attempts] == [(True, False), (True, True)]
    recent.ended(two, 17.0, status=503, code="no_capacity")
    recent.ended(three, 18.0, status=499, code="client_left")
    assert not recent.story(one, 99.0).known
    assert (recent.story(two, 99.0).code, recent.story(three, 99.0).status) == ("no_capacity", 499)
    recent.granted(RequestId("g-9"), 1, ReplicaId("r-1"), 0.0)
    recent.first_output(RequestId("g-9"), 1.0)
