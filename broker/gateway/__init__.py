"""The gateway: owns a request from its first byte to its last, and is the only judge of who runs it.

Contract of this folder: a shell around ``broker.core.requests``. ``app`` are the HTTP routes, ``nats_ingress`` the way in
over NATS, ``gateway`` joins both with admission, tokenizers and the request core's shell (``request_shell``),
``exchange`` is one client's answer under way, ``main`` the process.
"""
