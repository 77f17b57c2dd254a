"""The broker: gateways that own requests, and the scheduler that owns placement.

Contract of this folder:

- ``core/`` decides and does no IO; everything else here is a shell around it.
- The gateway (``gateway.py`` and what it uses: ``http_*``, ``openai_*``, ``nats_ingress``, ``request_shell``, ``kv_sync``)
  owns a request from its first byte to its last. It is the only judge of who runs what. Other APIs (``other_apis``,
  ``anthropic_*``, ``responses_*``) are chats to everything behind ``http_app``.
- The scheduler (``scheduler.py``, ``scheduler_control.py``, ``kv_control.py``, ``registry_sync.py``, ``lease.py``) loads and
  unloads models by commands to worker agents. It is never in a request's way: while it is away, what is loaded goes on
  serving. Of several one leads; agents refuse the commands of an older epoch.
- Gateway and scheduler meet on the bus only: demand goes out as ``tel.ingress.*``, the pool comes back as ``pool``.

Imports: ``kvcache``, ``profiles``, ``subjects``; never ``workers``.
"""
