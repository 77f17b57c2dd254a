"""The plan: which deployment gets how many replicas, and where.

Contract of this folder: pure; reads the pool, changes nothing of it. ``view`` makes what a ``policy`` may know of it. The
``coordinator`` is the policy that is ours: what each model needs (``need``, ``headroom``, ``capacity``) and
will need (``prewarming`` with ``forecast``, ``series``, ``seasons``, ``triggers``, ``learning``) makes a ``problem``,
whose best ``layout`` ``search`` looks for; ``memory`` and ``standby`` share out what is left. ``availability``,
``feasibility`` and ``usage`` answer what could run where, and who uses what; ``fairness`` weighs classes.
"""
