"""``make check-extra``: suites that others wrote, run against a whole pool of ours.

A pool is started as ``carpool up`` does (NATS, Valkey, scheduler, worker agent, gateway) with simulated models, a scripted
OpenAI server behind ``openai_http``, and a real SmolLM2 on vLLM. Every suite is a client that we did not write, with the
versions of ``locks/``, in an environment of its own below the user's cache. What is not run is in ``exclusions.toml`` with
its reason, and in ``EXCLUSIONS.md`` for people.

Nothing here is collected by pytest's defaults: it needs a package index and takes minutes.
"""
