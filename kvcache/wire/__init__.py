"""What engines and KV nodes say to each other over the local socket: ``messages``, and the ``client`` in the engine."""
