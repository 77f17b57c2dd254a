"""What all parts of Carpool agree on: identifiers, subjects, messages, errors, and the bus that carries them.

Contract of the folder:

- ``ids`` names things, ``names`` is the only place that writes a subject, stream, bucket or consumer name, ``messages`` the
  only place that defines what crosses a process boundary, ``codec`` the only way to and from bytes, ``errors`` the one tree.
- ``bus`` is the protocol, ``nats/`` its form on a NATS server. Nothing else in the project imports nats-py.
- ``client`` is the SDK for users, who know it as ``carpool``: ``CrossModelScheduler`` and ``AsyncCrossModelScheduler``.
- Imports nothing of ours from outside this folder, and nothing heavy at import time beyond msgspec.
- Wire format: MessagePack maps, frozen by golden bytes. A new field has a default; a field is never renamed or reused.

Glossary, one word per idea everywhere:

========== ===============================================================================================================
request    One call of a client, from its first byte to the last of its answer; attempts of it are fenced.
model      Weights, configuration, tokenizer and chat template, named by their SHA-256 (``ModelHash``).
deployment What is placed: a model, a replica's shape (context, KV, devices, engine options) and a tenant.
replica    An engine process that serves one deployment.
worker     An agent and the devices of one host that it owns.
device     A GPU, a MIG slice or a CPU budget of memory.
page       A block of KV in an engine's cache; 64 KiB in a file.
tier       Where KV lies: device, host memory, disk.
class      What a request is worth: gold, silver, bronze, batch.
tenant     Whose request or deployment it is.
ticket     A request's profile in the work-queue: numbers, no prompt.
link       What a gateway knows of one replica: the credit it gave to dispatch to it.
lane       A request's size by its KV pages: small, medium, long.
cordoned   Takes no new requests; surplus: not needed by the plan any more; standby: loaded and unused until a surge.
need       Capacity that a deployment wants, in devices: GPU-seconds per second.
========== ===============================================================================================================
"""
