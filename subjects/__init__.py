"""What all parts of Carpool agree on: identifiers, subjects, messages, errors, and the bus that carries them.

Contract of the folder:

- ``ids`` names things, ``names`` is the only place that writes a subject, stream, bucket or consumer name, ``messages`` the
  only place that defines what crosses a process boundary, ``codec`` the only way to and from bytes, ``errors`` the one tree.
- ``bus`` is the protocol; ``nats_bus`` (with ``nats_connection``, ``nats_jetstream``, ``nats_queue`` and ``nats_kv``) is its
  form. Nothing else in the project imports ``nats``.
- ``client`` is the SDK for users, who know it as ``carpool``: ``CrossModelScheduler`` and ``AsyncCrossModelScheduler``.
- Imports nothing of ours from outside this folder, and nothing heavy at import time beyond msgspec.
- Wire format: MessagePack maps, frozen by golden bytes. A new field has a default; a field is never renamed or reused.
"""
