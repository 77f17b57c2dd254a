"""What the KV tiers raise. All of it costs time only: who gets one computes again.

::

    CarpoolError
    ├── KvUnavailable     the node is away, frozen, or broke off
    └── KvRefused         the node is there and says no, with its reason

``kvcache.store.store`` has its own, of directories that cannot be used; ``kvcache.codec.codecs`` of payloads.
"""

from __future__ import annotations

from subjects.errors import CarpoolError


class KvUnavailable(CarpoolError):
    """The node is away, frozen, or the connection broke; nothing is known of what was asked."""


class KvRefused(CarpoolError):
    """The node answered with a reason why it does not do what was asked."""
