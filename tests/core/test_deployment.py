"""What is placed is a deployment: the same files in another shape, or of another tenant, never share a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.core.pool.catalogue import Catalogue
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.journal import Course, resume
from broker.core.pool.older import kept_in_journal, told_by_gateway, told_by_worker
from broker.core.pool.state import Pool
from profiles.budget import with_kv
from profiles.deployment import PARSING_OPTIONS, decode_record, deployment_key, parses_with, sharers, with_deployment
from profiles.hashing import directory_model_hash, tokenizer_hash
from profiles.record import verify_record
from profiles.registry import Registry
from profiles.tiny import make_tiny
from subjects.codec import decode, encode
from subjects.ids import DeploymentKey, DeviceId, IngressId, ModelHash, OperationId, ReplicaId, WorkerId, model_key
from subjects.messages import (
    DeviceKind,
    DeviceReport,
    EngineType,
    IngressTelemetry,
    Lane,
    LoadModel,
    Mode,
    ModelDemand,
    ModelRecord,
    ReplicaReport,
    ReplicaState,
    Sla,
    SlaClass,
    StepCosts,
    StepSent,
    TransactionBegan,
    WorkerSnapshot,
)
from tests.core.scheduler_world import GIB, Request, World, model_hash
from tests.core.scheduler_world import record as named_record
from tests.core.test_profiles_models import record_of

FILES = model_hash("files")
WORKER = WorkerId("w-0123456789")


def record(name: str, gib: float = 1.0, /, **changes: object) -> ModelRecord:
    """A model of these files as the registry has it."""
    bare = named_record(name, gib, model_hash=FILES, deployment=DeploymentKey(""))
    return with_deployment(msgspec.structs.replace(bare, **changes))


def as_before(one: ModelRecord) -> bytes:
    """The record as a version without deployments wrote it."""
    fields = msgspec.msgpack.decode(encode(one))
    del fields["deployment"]
    return msgspec.msgpack.encode(fields)


OTHERS: dict[str, dict[str, Any]] = {
    "files": {"model_hash": model_hash("others")},
    "tenant": {"tenant": "red"},
    "context": {"max_context_len": 512},
    "kv": {"kv_bytes": 20 * GIB},
    "gpus": {"gpus": 2},
    "engine": {"engine_type": EngineType.VLLM},
    "sequences": {"max_num_seqs": 4},
    "block": {"block_size": 16},
    "adapters": {"adapters_max": 4},
    "kv reuse": {"kv_reuse": False},
    "kv codec": {"kv_codec": "zstd"},
    "option": {"engine_options": {"enforce_eager": True}},
    "its value": {"engine_options": {"enforce_eager": False}},
    "chat template": {"engine_options": {"chat_template": "x"}},
}


def test_what_makes_another_deployment() -> None:
    """Each of these alone; keys are 64 hex digits, and subjects take them."""
    keys = [record("m", **changes).deployment for changes in [{}, *OTHERS.values()]]
    assert len(set(keys)) == len(OTHERS) + 1
    assert [model_key(key) for key in keys] == [key[:16] for key in keys]


SAME: dict[str, dict[str, Any]] = {
    "name": {"name": "n", "aliases": ("x",), "version": "2", "revision": 9, "tags": ("t",), "source": "/elsewhere"},
    "numbers": {"min_replicas": 1, "max_replicas": 9, "pinned": True, "mode": Mode.ADVISE, "allow_co_location": False},
    "service": {"sla": Sla(ttft_p95_ms=1), "sla_class": SlaClass.GOLD, "max_wait_s": 1.0, "fallback": "f"},
    "costs": {"costs": {"cpu": StepCosts(prefill_token_s=1.0, step_const_s=1.0)}, "cost_weight": 2.0, "overhead_bytes": 5},
    "defaults": {"max_output_tokens_default": 7, "warmup_tokens": 1},
    "parsers": {"engine_options": dict.fromkeys(PARSING_OPTIONS, "hermes")},
}


@pytest.mark.parametrize("what", sorted(SAME))
def test_what_makes_no_other_deployment(what: str) -> None:
    """What is decided about replicas from outside, measured, or only read from answers."""
    assert record("m", **SAME[what]).deployment == record("m").deployment


def test_it_is_the_registrys_word_and_no_load_changes_it() -> None:
    """A load with another KV than the file's is of the same deployment, and those who share one are told."""
    one = record("a")
    assert with_deployment(with_kv(one, 5 * GIB)).deployment == one.deployment != deployment_key(with_kv(one, 5 * GIB))
    assert sharers(one, [record("c"), record("b"), record("d", tenant="red"), one]) == ["b", "c"]


def test_services_of_the_same_files_that_parse_answers_otherwise_share_replicas(tmp_path: Path) -> None:
    """By their files; a registry of before, whose model hash counts the parsers, still verifies, as a deployment of its
    own until it is applied again."""
    make_tiny("m", tmp_path / "m", seed=1)
    options = {"tool_call_parser": "hermes", "enforce_eager": True}
    spec = {"source": "m", "engine": {"options": options}}
    tools = record_of(spec, tmp_path, name="tools")
    plain = record_of({"source": "m", "engine": {"options": {"enforce_eager": True}}}, tmp_path, name="plain")
    assert (tools.model_hash, tools.deployment) == (plain.model_hash, plain.deployment)
    assert (parses_with(tools.engine_options), parses_with(plain.engine_options)) == ({"tool_call_parser": "hermes"}, {})
    assert record_of({"source": "m"}, tmp_path).deployment != plain.deployment
    files = tmp_path / "m"
    variant = {"dtype": tools.dtype, "options": options}
    hash_before = directory_model_hash(files, tools.weights_hash, tokenizer_hash(files), variant)
    older = decode_record(as_before(msgspec.structs.replace(tools, model_hash=hash_before)))
    assert len({older.deployment, tools.deployment}) == 2
    for one in (tools, plain, older):
        verify_record(one)


# ------------------------------------------------------------------------------------------------------------- placement


def ask(world: World, of: ModelRecord, service_s: float = 0.5) -> Request:
    """A request for the deployment of a record."""
    request = Request(of.deployment, world.now_s, service_s)
    world.requests.append(request)
    world.dispatch()
    world.send(world._report())
    return request


def test_tenants_with_the_same_files_share_no_replica_and_no_device() -> None:
    """Red's and blue's: each is served by its own replica on a device of its own, though both would fit on one."""
    red, blue = record("red", tenant="red"), record("blue", tenant="blue")
    world = World(red, blue)
    agent = world.agent(cpu0=4.0, cpu1=4.0)
    asked = [ask(world, one) for one in (red, blue, red, blue)]
    world.run_until(world.all_ended, bound_s=30.0)
    assert [request.refusal for request in asked] == [""] * 4
    places = {one.record.tenant: one.devices for one in agent.replicas.values()}
    assert sorted(places) == ["blue", "red"] and places["red"] != places["blue"]
    assert {asked[0].replica, asked[2].replica}.isdisjoint({asked[1].replica, asked[3].replica})


def test_tenants_take_turns_on_one_device() -> None:
    """With one device the other tenant's replica leaves first."""
    red, blue = record("red", tenant="red"), record("blue", tenant="blue")
    world = World(red, blue)
    agent = world.agent(cpu0=4.0)
    asked = []
    for one in (red, blue):
        asked.append(ask(world, one))
        while asked[-1].ended_s is None:
            world.run(0.05)
            assert len({there.record.tenant for there in agent.replicas.values()}) <= 1
            assert world.now_s < 200.0
    assert [request.refusal for request in asked] == ["", ""]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("long", {"max_context_len": 2048}),
        ("much-kv", {"kv_bytes": 20 * GIB, "budget_bytes": 24 * GIB}),
        ("wide", {"gpus": 2}),
    ],
)
def test_one_shape_is_never_ready_on_anothers_replica(name: str, changes: dict[str, Any]) -> None:
    """The small one's replica is there; the other one waits for its own, with all that it needs."""
    small, other = record("a-short", max_context_len=512, kv_bytes=32 << 20), record(name, **changes)
    world = World(small, other)
    world.agent(cpu0=4.0)
    if name == "wide":
        world.agent("v", gpu0=2.0, gpu1=2.0)
    ask(world, small)
    world.run_until(world.all_ended, bound_s=30.0)
    waits = ask(world, other)
    world.run(0.5)
    assert waits.started_s is None
    if name == "much-kv":
        world.run_until(lambda: bool(waits.refusal), bound_s=30.0)
        assert world.outlook(name)[1]  # for ever: no device is as large
        return
    world.run_until(lambda: waits.started_s is not None, bound_s=60.0)
    replica = next(r for agent in world.agents for r in agent.replicas.values() if r.replica == waits.replica)
    assert (replica.record.name, replica.record.max_context_len, len(replica.devices)) == (
        name,
        other.max_context_len,
        other.gpus,
    )


# ---------------------------------------------------------------------------------------------- what older versions wrote


def test_an_older_record_gets_its_key_where_it_is_read(tmp_path: Path) -> None:
    """The same that applying its file again would give; an older mirror is read with it."""
    one = record("a", tenant="red")
    assert decode(as_before(one), ModelRecord).deployment == ""
    assert decode_record(as_before(one)) == one
    registry = Registry(tmp_path / "registry.sqlite")
    registry.put(one)
    registry._database.execute("UPDATE models SET record = ?", (as_before(one),))
    registry.close()
    registry = Registry(tmp_path / "registry.sqlite")
    assert (registry.list(), registry.get("a")) == ([one], one)
    registry.close()


def catalogue(*records: ModelRecord) -> Catalogue:
    """A registry."""
    made = Catalogue()
    made.load(records)
    return made


def report(name: str = "a-1-1", **changes: Any) -> ReplicaReport:
    """A replica as a worker without deployments lists it."""
    fields: dict[str, Any] = {
        "replica": ReplicaId(f"{name}-bbbbbbbbbb"),
        "model_hash": FILES,
        "device": DeviceId("cpu0"),
        "state": ReplicaState.READY,
        "budget_bytes": GIB,
    }
    return ReplicaReport(**(fields | changes))


def snapshot(*replicas: ReplicaReport) -> WorkerSnapshot:
    """A worker with one device."""
    device = DeviceReport(device=DeviceId("cpu0"), kind=DeviceKind.CPU, memory_bytes=4 * GIB, reserved_bytes=GIB)
    return WorkerSnapshot(worker=WORKER, sequence=1, epoch_seen=0, devices=(device,), replicas=replicas)


def test_an_older_workers_replica_is_of_the_only_deployment_of_its_files() -> None:
    """Of none where there are two or nobody knows the files; what a worker says itself is never changed."""
    one, red = record("a"), record("b", tenant="red")
    told = snapshot(report(), report("r-1-2", deployment=red.deployment), report("x-1-3", model_hash=model_hash("x")))
    assert [r.deployment for r in told_by_worker(told, catalogue(one, record("c"))).replicas] == [
        one.deployment,
        red.deployment,
        "",
    ]
    assert [r.deployment for r in told_by_worker(told, catalogue(one, red)).replicas] == ["", red.deployment, ""]
    new = snapshot(report(deployment=one.deployment))
    assert told_by_worker(new, catalogue(one)) is new


def test_an_older_gateways_counts_go_to_the_only_deployment_of_the_files() -> None:
    """And are left out where there are two."""
    one, red = record("a"), record("b", tenant="red")
    row = ModelDemand(model_hash=FILES, sla_class=SlaClass.GOLD, lane=Lane.SMALL, waiting=3)
    told = IngressTelemetry(ingress=IngressId("g-1"), sequence=1, demand=(row,))
    assert [r.deployment for r in told_by_gateway(told, catalogue(one)).demand] == [one.deployment]
    assert told_by_gateway(told, catalogue(one, red)).demand == ()


def test_an_older_journal_goes_on() -> None:
    """A placement with another KV than the record's: the registry tells its deployment by the name, and of what left by the
    files."""
    one, old = record("a"), with_deployment(named_record("old", deployment=DeploymentKey("")))
    placed = decode(as_before(with_kv(one, 3 * GIB)), ModelRecord)
    began = TransactionBegan(
        transaction="1-2",
        kind="place",
        at_unix_s=10.0,
        reason="it waits",
        worker=WORKER,
        devices=(DeviceId("cpu0"),),
        record=placed,
        replica_name="a-1-2",
        replicas=(ReplicaId("old-1-1-aaaaaaaaaa"),),
        model_hashes=(old.model_hash,),
    )
    load = LoadModel(operation=OperationId("op-1"), epoch=1, device=DeviceId("cpu0"), record=placed, replica_name="a-1-2")
    step = StepSent(transaction="1-2", operation=OperationId("op-1"), worker=WORKER, at_unix_s=11.0, command=load)
    known = catalogue(one, old)
    read = kept_in_journal(decode(encode(began), TransactionBegan), known)
    assert isinstance(read, TransactionBegan) and read.record is not None
    assert (read.record.deployment, read.deployments) == (one.deployment, (old.deployment,))
    pool = Pool(SchedulerSettings())
    pool.round_trip(0.0)
    pool.report(0.0, snapshot(report("a-1-2", state=ReplicaState.LOADING)))
    (resumption,) = resume([began, step], pool, known)
    assert (resumption.course, resumption.gone) == (
        Course.GO_ON,
        ((ReplicaId("old-1-1-aaaaaaaaaa"), old.deployment),),
    )
    command = next(iter(resumption.recorded.steps.values())).sent.command
    assert isinstance(command, LoadModel) and command.record.deployment == one.deployment
    changed = catalogue(msgspec.structs.replace(one, model_hash=ModelHash("9" * 64)), old)
    left = kept_in_journal(began, changed)
    assert isinstance(left, TransactionBegan) and left.record is not None and left.record.deployment != one.deployment
