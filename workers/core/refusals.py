"""What an engine says of a request it refuses, made fit to be told to its client."""

from __future__ import annotations

import re

MESSAGE_CHARS_MAX = 600
"""An engine's text can quote a whole schema."""
_APPENDIX = re.compile(r"\s\((parameter|value)=.*\)$", re.DOTALL)


def client_message(text: str) -> str:
    """Without the value that vLLM appends, which can be the prompt, and short."""
    return _APPENDIX.sub("", text)[:MESSAGE_CHARS_MAX]
