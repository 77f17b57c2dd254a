"""vLLM's KV connector: the half in its scheduler, the half in its workers, and the copies of tensors."""
