"""The ``carpool`` command. Each command imports what it needs when it runs, so that ``carpool --help`` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from ops.calibrate_cli import calibrate
from ops.cli_common import Pool, bus_url, json_option, nats_option, on_pool, pool_name_option, run
from ops.costs_cli import profile
from ops.event_cli import event
from ops.evidence_cli import bench, prove, replay_scheduler
from ops.kv_cli import evict_kv, kv_options, migrate_kv, worker_flags
from ops.people_cli import drain, explain, lock, mode, unlock
from ops.simulate_cli import simulate

_PORT = click.IntRange(0, 65535)
API_KEYS_HELP = (
    "YAML file of API keys, {keys: [{key: at-least-16-characters, tenant: a}], trust_domains: {friends: [a, b]}}; needed "
    "for other than loopback."
)
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Main(click.Group):
    """Turns our own errors into one line on stderr and exit code 1 (2 for a wrong file or flag)."""

    def invoke(self, ctx: click.Context) -> Any:
        from subjects.errors import CarpoolError, ConfigError

        try:
            return super().invoke(ctx)
        except ConfigError as error:
            _fail(str(error), 2)
        except CarpoolError as error:
            _fail(str(error), 1)
        except BrokenPipeError:
            sys.exit(1)


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"carpool: {text}", err=True)
    sys.exit(code)


@click.group(cls=_Main, context_settings=_HELP)
@click.version_option(package_name="carpool")
def main() -> None:
    """Carpool serves many language models from one shared pool of devices.

    \b
    Start here:
      carpool demo                          three models share a device with room for two
      carpool up                            a pool on this machine
      carpool models fetch smollm2          get a small real model
      carpool apply -f my-models.yaml       declare models
      carpool get models                    what runs where
    """


# ------------------------------------------------------------------------------------------------------- running parts


def _known_policy(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    if text:
        from broker.scheduler.policies import make_policy
        from subjects.errors import ConfigError

        try:
            make_policy(text)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from None
    return text


_RECORDING = click.Path(path_type=Path, dir_okay=False)
_policy = click.option(
    "--policy",
    metavar="NAME[:SETTING=N,...]",
    callback=_known_policy,
    help="Who decides: the coordinator (carpool, the default), or the same while it learns which device suits which model "
    "(carpool-learning); with what a class is worth in devices (gold, silver, bronze, batch), how long an idle model stays "
    "(keep_s) and how many may share a device (models_per_device): carpool:gold=5000,keep_s=600.",
)


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the HTTP endpoint.")
@click.option("--port", default=8080, type=_PORT, show_default=True, help="Port of the HTTP endpoint; 0 takes any free one.")
@click.option("--nats", "nats_url", default="", help="Join this NATS server (JetStream on) and start none.")
@click.option("--redis", "redis_url", default="", help="Join this Redis or Valkey server and start none.")
@click.option("--nats-port", default=0, type=_PORT, help="Port of the embedded NATS server; 0 (default) takes any free one.")
@click.option("--redis-port", default=0, type=_PORT, help="Port of the embedded Valkey; 0 (default) takes any free one.")
@click.option("--device", "devices", multiple=True, help="A device to serve on, such as cpu:4GiB. May be repeated.")
@click.option("-f", "files", multiple=True, type=click.Path(path_type=Path), help="Models to apply once it is up.")
@click.option("--api-keys", type=click.Path(path_type=Path), help=API_KEYS_HELP)
@click.option("--allow-open", is_flag=True, help="Serve other hosts without API keys.")
@click.option("--gateway-processes", default=1, show_default=True, help="Processes of the gateway, for more cores.")
@click.option("--no-worker", is_flag=True, help="Start no worker agent here.")
@kv_options
@_policy
@click.option(
    "--record-scheduler", "record", type=_RECORDING, help="Record what the scheduler hears and orders, for a replay."
)
@pool_name_option
def up(
    host: str,
    port: int,
    nats_url: str,
    redis_url: str,
    nats_port: int,
    redis_port: int,
    devices: tuple[str, ...],
    files: tuple[Path, ...],
    api_keys: Path | None,
    allow_open: bool,
    gateway_processes: int,
    no_worker: bool,
    policy: str | None,
    record: Path | None,
    pool_name: str,
    **kv: Any,
) -> None:
    """Run a whole pool on this machine until Ctrl-C.

    \b
    carpool up
    carpool up --device cpu:4GiB -f models.yaml
    carpool up --nats nats://10.0.0.5:4222 --redis redis://10.0.0.5:6379/0
    """
    from ops.models import records_of
    from ops.paths import pool_state
    from ops.supervisor import PoolOptions
    from ops.up import run_up

    records = records_of(files)  # A wrong file is told before anything starts.
    options = PoolOptions(
        state_dir=pool_state(pool_name),
        host=host,
        http_port=port,
        nats_url=nats_url,
        nats_port=nats_port,
        redis_url=redis_url,
        redis_port=redis_port,
        devices=devices,
        gateway_flags=(*_open_flags(api_keys, allow_open), "--processes", str(gateway_processes)),
        scheduler_flags=(
            *(("--policy", policy) if policy else ()),
            *(("--record", str(record.absolute())) if record else ()),
        ),
        worker=not no_worker,
        worker_flags=worker_flags(kv),
    )
    sys.exit(run(run_up(options, records)))


_shards = click.option(
    "--queue-shards", "shards", default=1, show_default=True, help="Streams of the work-queue; same everywhere."
)
_state = click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Where this part keeps its state. Default: below the user's state."
)


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, type=_PORT, show_default=True, help="Port to listen on; 0 takes any free one.")
@click.option("--api-keys", type=click.Path(path_type=Path), help=API_KEYS_HELP)
@click.option("--allow-open", is_flag=True, help="Serve other hosts without API keys.")
@click.option("--id", "name", default="gateway", show_default=True, help="Name of this gateway on the bus.")
@click.option("--processes", default=1, show_default=True, help="Processes that share the port, for more cores.")
@click.option("--process", type=int, hidden=True, help="Be this one of the processes.")
@click.option("--process-dir", type=click.Path(path_type=Path), hidden=True, help="Where the processes meet.")
@_shards
@nats_option
def gateway(
    host: str,
    port: int,
    api_keys: Path | None,
    allow_open: bool,
    name: str,
    processes: int,
    process: int | None,
    process_dir: Path | None,
    shards: int,
    nats_url: str,
) -> None:
    """Run one gateway: the OpenAI endpoint and the NATS ingress.

    \b
    carpool gateway --nats nats://10.0.0.5:4222 --port 8080
    carpool gateway --nats nats://10.0.0.5:4222 --port 8080 --processes 4
    """
    url = bus_url(nats_url)
    if processes != 1 and process is None:
        from ops.gateway_processes import GatewayProcesses, run_processes

        flags = [*_open_flags(api_keys, allow_open), "--queue-shards", str(shards)]
        options = GatewayProcesses(processes=processes, name=name, host=host, port=port, nats_url=url, flags=flags)
        sys.exit(run(run_processes(options)))
    from ops import parts

    place = None if process is None or process_dir is None else (process_dir, process, processes)
    sys.exit(run(parts.gateway(url, name, host, port, api_keys, allow_open, shards, place)))


def _open_flags(api_keys: Path | None, allow_open: bool) -> list[str]:
    return [*(["--api-keys", str(api_keys)] if api_keys else []), *(["--allow-open"] if allow_open else [])]


@main.command(short_help="Run one scheduler; of several, one leads.")
@click.option("--id", "name", default="scheduler", show_default=True, help="Name of this scheduler on the bus.")
@_policy
@click.option("--record", type=_RECORDING, help="Record what it hears and orders, for `carpool replay-scheduler`.")
@_shards
@_state
@nats_option
def scheduler(**given: Any) -> None:
    """Run one scheduler; of several, one leads and the others stand by.

    \b
    carpool scheduler --nats nats://10.0.0.5:4222
    carpool scheduler --policy carpool-learning --record decisions.rec
    """
    from ops import parts

    sys.exit(run(parts.scheduler(**given)))


@main.command(short_help="Run one worker agent with this machine's devices.")
@click.option("--device", "devices", multiple=True, help="A device to serve on, such as cpu:4GiB. May be repeated.")
@click.option("--threads", default=0, help="CPU threads of each replica; 0 (default): as many as there are cores.")
@click.option(
    "--step-turns/--no-step-turns",
    default=None,
    help="Whether engines on one device step in turns, the most urgent first. Default: on GPUs.",
)
@click.option("--id", "name", default="", help="Name of this worker on the bus. Default: the host's name.")
@kv_options
@click.option(
    "--redis",
    "redis_url",
    envvar="CARPOOL_REDIS",
    default="",
    help="Redis or Valkey that workers share the hotness of KV in. Default: $CARPOOL_REDIS, else each has its own.",
)
@_shards
@_state
@nats_option
def worker(**given: Any) -> None:
    """Run one worker agent: it starts and ends the replicas on this machine's devices.

    \b
    carpool worker --nats nats://10.0.0.5:4222 --device cpu:8GiB
    carpool worker --nats nats://10.0.0.5:4222 --kv-dir /nvme/kv --kv-disk 200GiB --kv-data-host 10.0.0.7
    """
    from ops import parts

    sys.exit(run(parts.worker(**given)))


# ------------------------------------------------------------------------------------------------------------- models


@main.command(short_help="Declare models: the first request (or min_replicas) loads them.")
@click.option("-f", "files", multiple=True, required=True, type=click.Path(path_type=Path), help="ModelService YAML.")
@click.option("--dry-run", is_flag=True, help="Check the files and print what would be applied.")
@nats_option
@pool_name_option
def apply(files: tuple[Path, ...], dry_run: bool, nats_url: str, pool_name: str) -> None:
    """Declare models: register them, so that the first request (or min_replicas) loads them.

    \b
    carpool apply -f models.yaml
    carpool apply -f models.yaml --dry-run
    """
    from ops.models import apply_records, records_of

    url = "" if dry_run else bus_url(nats_url, pool_name)
    run(apply_records(records_of(files), nats_url=url))


@main.command(short_help="Show models, replicas, devices, queues, costs, KV tiers, locks or the timeline.")
@click.argument("what", type=click.Choice(["models", "replicas", "devices", "queues", "timeline", "locks", "kv", "costs"]))
@on_pool
def get(pool: Pool, what: str) -> None:
    """Show models, replicas, devices, queues, people's locks, the timeline of placement actions, what each worker keeps of
    models' KV in host memory and on disk, or what models' steps cost on each kind of device and who says so.

    \b
    carpool get models
    carpool get timeline --json
    """
    from ops.models import show

    run(show(what, as_json=pool.as_json, nats_url=pool.url))


def _verb(name: str, done: str, short: str, help_text: str) -> None:
    @main.command(name, short_help=short, help=f"{help_text}\n\n\b\ncarpool {name} smollm2")
    @click.argument("model")
    @on_pool
    def command(pool: Pool, model: str) -> None:
        pool.tell(pool.ask(name, model=model), lambda: f"{model}: {done}")


_verb(
    "pin",
    "pinned",
    "Keep a model's replicas from eviction.",
    "Keep a model's replicas: nothing evicts them until `carpool unpin`.",
)
_verb("unpin", "unpinned", "Let a pinned model be evicted again.", "Let a pinned model be evicted again.")
_verb(
    "unload",
    "unloading",
    "Drain and unload a model's replicas.",
    "Drain and unload a model's replicas; the next request loads it again.",
)
_verb("delete", "deleted", "Forget a model.", "Forget a model: drain its replicas and refuse its name from now on.")


@main.group()
def models() -> None:
    """Get or make models on this machine.

    \b
    carpool models fetch smollm2
    carpool models make-tiny tiny-a
    """


@models.command(short_help="Fetch a small real model and convert it once.")
@click.argument("model", type=click.Choice(["smollm2"]))
def fetch(model: str) -> None:
    """Fetch a small real model and convert it once (SmolLM2-135M-Instruct, Apache-2.0, 93 MB)."""
    from ops.models import fetch_model

    click.echo(fetch_model(model))


@models.command("make-tiny", short_help="Make a tiny model with random weights.")
@click.argument("name")
@click.option("--seed", default=0, show_default=True, help="Another seed gives another model.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to write it. Default: the model cache.")
def make_tiny(name: str, seed: int, directory: Path | None) -> None:
    """Make a tiny model with random weights: its answers are noise, it loads in a moment."""
    from ops.models import make_tiny_model

    click.echo(make_tiny_model(name, seed=seed, directory=directory))


@main.command()
def schema() -> None:
    """Print the JSON Schema of ModelService files, for editors.

    \b
    carpool schema > model-service.schema.json
    """
    import json

    from profiles.service import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


# ------------------------------------------------------------------------------------------------------------ evidence


@main.command(short_help="Three real engines make room for each other on one CPU device.")
@click.option("--keep", is_flag=True, help="Leave the pool running after the show, until Ctrl-C.")
@json_option
def demo(keep: bool, as_json: bool) -> None:
    """Three real engines share one CPU device with room for two: watch them make room for each other."""
    from ops.demo import models_of_demo, run_demo

    sys.exit(run(run_demo(models_of_demo(quiet=as_json), keep=keep, as_json=as_json)))


main.add_command(simulate)
main.add_command(calibrate)
for command in (prove, replay_scheduler, bench, explain, lock, unlock, drain, mode, profile, event, evict_kv, migrate_kv):
    main.add_command(command)


if __name__ == "__main__":
    main()
