"""Operations: the command line, the supervisor of the embedded set, the demo, benchmarks and proofs.

``cli`` is the entry point and imports nothing heavy; each command loads what it needs when it runs. ``servers`` finds the
embedded nats-server and Valkey, ``supervisor`` runs them together with a gateway, a scheduler and a worker agent,
``gateway_processes`` runs one gateway as several processes on one port (``kept``: a child that is kept running), ``paths``
says where state and caches live. Everything here may import every other package; nothing imports this one but tests.
"""
