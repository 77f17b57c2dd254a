"""``carpool simulate``: the production cores on a virtual clock, over public traces, with simulated engines.

Contract of this folder: nothing here decides for the pool. What is decided comes from ``broker.core`` (the scheduler and
its policy, the gateway's ledger and admission) and ``workers.core`` (agents, what a replica pulls); here are the heap of
events, the engines, the traces, the yardsticks to compare with (``policies``), and the reports. All is drawn from one seed.

- ``types``: models, traces, workloads, pools, results. ``workloads``: the fixed ones. ``traces``: readers and samplers.
- ``engine``: continuous batching that advances from event to event. ``device``: devices that engines share.
- ``world``: the heap and the clock, requests, ``queueing`` and ``replicas``. ``control``: the scheduler's and the agents'
  cores on it, ``link`` for loads from afar. ``run``: one run, under ``options``.
- ``metrics``, ``report``, ``suite``: what a run says of itself.
- ``policies``: baselines, the clairvoyant oracle; ``bound``: what no schedule can go below.
"""
