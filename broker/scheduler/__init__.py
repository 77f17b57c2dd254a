"""The scheduler: loads and unloads models by commands to worker agents, and is never in a request's way.

Contract of this folder: a shell around ``broker.core.scheduler``. ``shell`` is the process, ``lease`` its leadership,
``registry_sync``, ``overrides_sync``, ``costs_sync`` (each a ``bucket_sync``) and ``journal_keeper`` what it keeps in NATS,
``control``, ``operator_verbs`` and ``kv_control`` the verbs of the command line, ``explain`` the texts that say why,
``recording`` writes events for a replay, ``policies`` names the policies.
"""
