"""Every message that crosses a process boundary (BUS-1).

All are frozen, keyword-only msgspec structs carried as MessagePack maps. New fields get defaults, so that an older peer can
still be understood; unknown fields of a newer peer are ignored. Times named ``*_unix_s`` are wall-clock seconds; a duration
or age is relative to the moment of sending, since clocks of two machines differ. Tokens, pages and bytes are integers.
"""

from subjects.messages.commands import *
from subjects.messages.journal import *
from subjects.messages.kinds import *
from subjects.messages.kv import *
from subjects.messages.operator import *
from subjects.messages.registry import *
from subjects.messages.request import *
from subjects.messages.telemetry import *
