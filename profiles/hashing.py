"""Weights hash and model hash (PRO-3): who a model is, from its bytes.

``weights_hash`` is SHA-256 over the sorted manifest of weight files; it identifies KV and storage. ``model_hash`` adds the
configuration, the tokenizer, the chat template and the precision that the engine loads it in; it identifies behaviour.
Digests of files are remembered in the user cache under path, size, times and inode, so that a second look is instant.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import stat
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from profiles.paths import cache_dir
from profiles.tokenizer import DEFAULT_CHAT_TEMPLATE
from subjects.errors import ConfigError, EngineError
from subjects.ids import ModelHash

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_MORE_TEMPLATES = "additional_chat_templates"
_CONFIG_FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
_SETTLED_S = 2.0
"""A file changed more recently than this may change again within one tick of its clock: its digest is not remembered."""
_CACHE_TIMEOUT_S = 2.0


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name.

    Raises:
        ConfigError: no directory, no such files, or only weights in another format.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; name the folder that holds config.json and *.safetensors")
    files = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if not files:
        others = sorted({path.suffix for path in directory.iterdir() if path.suffix in (".bin", ".gguf", ".pt", ".pth")})
        found = f" (found {', '.join(others)})" if others else ""
        raise ConfigError(f"{directory}: no *.safetensors files{found}; convert the model with save_pretrained")
    return files


def weights_hash(directory: Path, *, trust_cache: bool = True) -> str:
    """SHA-256 in hex over the sorted manifest: name, size and SHA-256 of each weight file.

    Raises:
        ConfigError: no weights there, or a file changed while it was read.
    """
    digests = Digests()
    files = [(path.stat().st_size, digests.file(path, trust=trust_cache), path.name) for path in weight_files(directory)]
    manifest = "".join(f"{size} {digest} {name}\n" for size, digest, name in files)
    return hashlib.sha256(b"carpool weights 1\n" + manifest.encode()).hexdigest()


def tokenizer_hash(directory: Path, chat_template: str = "") -> str:
    """SHA-256 in hex over the tokenizer's files and chat template; models with equal ones count tokens alike.

    ``chat_template`` is one that the service declares in place of the model's own.
    """
    digests = Digests()
    state = hashlib.sha256(b"carpool tokenizer 1\n")
    more_templates = sorted(path.name for path in (directory / _MORE_TEMPLATES).glob("*.jinja"))
    for name in (*_TOKENIZER_FILES, *(f"{_MORE_TEMPLATES}/{template}" for template in more_templates)):
        if (directory / name).is_file():
            state.update(f"{digests.file(directory / name)} {name}\n".encode())
    if chat_template or not has_chat_template(directory):
        state.update((chat_template or DEFAULT_CHAT_TEMPLATE).encode())
    return state.hexdigest()


def has_chat_template(directory: Path) -> bool:
    """Whether the model brings a chat template of its own."""
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def directory_model_hash(directory: Path, of_weights: str, of_tokenizer: str, variant: Mapping[str, object]) -> ModelHash:
    """The model hash of files on disk.

    ``variant`` is how they are loaded: the precision, of which each has its own hash (WRK-6), and the engine's options.

    Raises:
        ConfigError: a configuration file is missing or is not JSON.
    """
    state = hashlib.sha256(f"carpool model 1\n{of_weights}\n{of_tokenizer}\n{canonical_json(variant)}\n".encode())
    for name in _CONFIG_FILES:
        if (directory / name).is_file() or name == "config.json":
            state.update(f"{name} {canonical_json(read_json(directory / name))}\n".encode())
    return ModelHash(state.hexdigest())


def parameters_hash(kind: str, parameters: Mapping[str, object]) -> ModelHash:
    """The model hash where there are no files: of a server's URL and model name, or of a simulated engine's parameters."""
    return ModelHash(hashlib.sha256(f"carpool {kind} 1\n{canonical_json(parameters)}\n".encode()).hexdigest())


def verify(directory: Path, expected: str, *, trust_cache: bool = True) -> None:
    """Checks the weights at load (PRO-3). ``trust_cache=False`` reads every byte again.

    Raises:
        EngineError: one line; the files are not those that were registered, or cannot be read.
    """
    try:
        found = weights_hash(directory, trust_cache=trust_cache)
    except ConfigError as error:
        raise EngineError(str(error)) from None
    if found != expected:
        raise EngineError(
            f"{directory}: the weights changed since they were registered (weights hash {found[:16]}, expected "
            f"{expected[:16]}); restore the files or run 'carpool apply' again"
        )


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file.

    Raises:
        ConfigError: missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; the model's directory needs it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: is not JSON; fetch the model's files again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is not a JSON object; fetch the model's files again")
    return value


def canonical_json(value: object) -> str:
    """JSON whose text depends on the values only, not on the order of keys or on spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class Digests:
    """SHA-256 of files, remembered in ``digests.sqlite`` of the user cache.

    The cache is a convenience: when it cannot be used, files are read again. Threads and processes may share it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_dir() / "digests.sqlite"

    def file(self, path: Path, *, trust: bool = True) -> str:
        """The digest in hex; read from the file when not remembered, or when ``trust`` is False.

        Raises:
            ConfigError: the file cannot be read, or changed while it was read.
        """
        key_path = path.resolve()
        try:
            before = key_path.stat()
            if not stat.S_ISREG(before.st_mode):
                raise ConfigError(f"{path}: is not a regular file; fetch the model's files again")
            key = _key(before)
            if trust and (known := self._recall(key_path, key)):
                return known
            digest = sha256_of(key_path)
            if _key(key_path.stat()) != key:
                raise ConfigError(f"{path}: changed while it was read; wait until the copy is complete and try again")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the file") from None
        if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_S:
            self._remember(key_path, key, digest)
        return digest

    def _recall(self, path: Path, key: str) -> str | None:
        if not self._path.exists():
            return None
        try:
            with closing(self._open()) as database:
                row = database.execute(
                    "SELECT sha256 FROM digests WHERE path = ? AND state = ?", (str(path), key)
                ).fetchone()
        except sqlite3.Error:
            return None
        return str(row[0]) if row else None

    def _remember(self, path: Path, key: str, digest: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS digests "
                    "(path TEXT PRIMARY KEY, state TEXT NOT NULL, sha256 TEXT NOT NULL) STRICT, WITHOUT ROWID"
                )
                database.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (str(path), key, digest))
        except (sqlite3.Error, OSError):
            return

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=_CACHE_TIMEOUT_S)


def _key(status: os.stat_result) -> str:
    # The change time is part of it because a copy can set the modification time back, but not this one.
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_dev}:{status.st_ino}"


def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
