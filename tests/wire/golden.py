"""Golden bytes: one instance of every message with every field set, as it went over the wire when it was frozen.

``golden.json`` maps the name of a message to hex. Bytes that are there are never changed: a pool is upgraded one process at
a time, so what an older peer sends must be understood. ``python -m tests.wire.golden`` adds messages that are missing.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec

from subjects import codec, messages

FILE = Path(__file__).parent / "golden.json"


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Every message by name."""
    return {
        name: kind
        for name, kind in sorted(vars(messages).items())
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind is not messages.Command
    }


def load() -> dict[str, bytes]:
    """The frozen bytes by name."""
    frozen: dict[str, str] = json.loads(FILE.read_text())
    return {name: bytes.fromhex(text) for name, text in frozen.items()}


def filled(kind: type[msgspec.Struct]) -> Any:
    """An instance in which no field has its default, drawn from the names of its fields."""
    return msgspec.convert(_value(msgspec.inspect.type_info(kind), kind.__name__), kind)


def _value(info: msgspec.inspect.Type, name: str) -> Any:
    seed = zlib.crc32(name.encode())
    match info:
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return seed % 100_000 + 1
        case msgspec.inspect.FloatType():
            return seed % 100_000 / 8 + 0.125
        case msgspec.inspect.StrType(pattern=str(pattern)):
            return (
                hashlib.sha256(name.encode()).hexdigest() if "{64}" in pattern else f"{name.replace('.', '-')}-{seed % 1000}"
            )
        case msgspec.inspect.StrType():
            return f"{name}-{seed % 1000}"
        case msgspec.inspect.BytesType():
            return f"{name}-{seed % 1000}".encode()
        case msgspec.inspect.EnumType():
            return list(info.cls)[-1].value
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.UnionType():
            return _value(next(part for part in info.types if not isinstance(part, msgspec.inspect.NoneType)), name)
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return [_value(info.item_type, f"{name}.0"), _value(info.item_type, f"{name}.1")]
        case msgspec.inspect.TupleType():
            return [_value(part, f"{name}.{index}") for index, part in enumerate(info.item_types)]
        case msgspec.inspect.DictType():
            return {_value(info.key_type, f"{name}.key"): _value(info.value_type, f"{name}.value")}
        case msgspec.inspect.StructType(array_like=True):
            return [_value(field.type, f"{info.cls.__name__}.{field.encode_name}") for field in info.fields]
        case msgspec.inspect.StructType():
            tag = {} if info.tag is None else {info.tag_field or "type": info.tag}
            return tag | {
                field.encode_name: _value(field.type, f"{info.cls.__name__}.{field.encode_name}") for field in info.fields
            }
        case _:
            raise TypeError(f"{name}: golden bytes know no {info}")


def main() -> None:
    """Adds what is missing."""
    frozen = {name: payload.hex() for name, payload in load().items()} if FILE.exists() else {}
    for name, kind in kinds().items():
        frozen.setdefault(name, codec.encode(filled(kind)).hex())
    FILE.write_text(json.dumps(frozen, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
