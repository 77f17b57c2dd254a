"""The broker: gateways that own requests, and the scheduler that owns placement.

Contract of this folder:

- ``core/`` decides and does no IO: ``requests`` for gateways; ``scheduler`` over ``plan`` over ``pool`` for schedulers.
- ``http/`` knows no API, ``api/`` no gateway; ``gateway/`` and ``scheduler/`` are shells around the cores.
- Gateway and scheduler meet on the bus only: demand goes out as ``tel.ingress.*``, the pool comes back as ``pool``.

Imports: ``kvcache``, ``profiles``, ``subjects``; never ``workers``.
"""
