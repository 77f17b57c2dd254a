"""Worker agents and replicas: the processes that hold models.

Contract of this folder:

- ``core/`` decides and does no IO; everything else here is a shell around it or an engine.
- ``agent.py`` is one process per device group. It alone starts, watches and ends replica processes, charges devices, and
  speaks for them on ``tel.*``, ``cmd.<worker>`` and ``evt.worker.<worker>``. It never imports an engine: beats come from a
  process that runs no torch. What an agent says is loaded is the truth.
- ``replica.py`` is one process per engine with one model. It pulls and serves requests without its agent's help, and exits
  at once when its agent is gone.
- ``control_messages.py`` is all that an agent and a replica say to each other, over the socket of ``control.py``;
  ``spec.py`` is what a replica is told at its start.
- ``processes.py`` is what the kernel knows of replicas: groups, exits, last words, PSS, and the sweep of leftovers.
- ``template.py`` is the process that vLLM replicas are forked from; its death kills nobody. ``forked.py`` is the first thing
  a forked replica does.
- ``kv_keeper.py`` starts the worker's KV node (``kvcache``), watches it and ends it with the agent; ``kv_config.py`` is what
  the node may use. Its death or silence ends no replica.
- ``devices.py`` finds devices and reads their memory. Sum of budgets <= capacity at every instant.
- ``engines/`` holds the implementations of one small protocol; they are imported late, by replica processes only.
  A request may name a LoRA adapter: ``core/adapters.py`` says who is loaded, who waits and who is evicted,
  ``engines/adapter_gate.py`` does it, and ``engines/vllm_lora_cpu.py`` is its arithmetic on a CPU (ops/decisions/0028).

Imports: ``kvcache``, ``profiles``, ``subjects``; never ``broker``.
"""
