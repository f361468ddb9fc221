"""The configuration of a run in its records: one row for each start of its process, without secrets.

The rows are in files of the sub-folder ``config``. A folder with several rows belongs to a run that was resumed, or to
several runs.

A value is a secret if its option's name says so (``api_key``, ``hf_token``, ``password``; also ``judge_key``, unless
the value is a word of small letters, as in ``prompt_key=prompt``), if it is an environment variable or a header, or if
it looks like a key of a known service. Secrets become the text `NOT_RECORDED`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from reward_loop._util.json import encode
from reward_loop._util.text import cut
from reward_loop.records.files import CONFIG
from reward_loop.records.reader import read_rows
from reward_loop.records.rows import new_row
from reward_loop.records.writer import Records, hide, records

NOT_RECORDED = "[not recorded]"
"""The value of an option that may be a secret."""

MAX_VALUE = 1000
"""The largest number of characters of a value; longer ones become text, and are cut, with a digest of the whole."""

MAX_BYTES = 512 * 1024
"""The largest size of all options of a row. Options beyond it are left out, and counted in ``omitted``."""

_SECRET_NAME = re.compile(
    r"(api|access|account|auth|private|secret|signing)_?key|secret|passw|passphrase|credential|authorization"
    r"|(^|_)(token|auth|cookie)$|_pwd$"
)
_KEY_NAME = re.compile(r"(^|_)key$")
_WORD = re.compile(r"[a-z_]{0,32}")
_OPEN_GROUPS = ("env", "env_vars", "environment", "headers", "default_headers", "extra_headers")
"""Groups whose values are environment variables or HTTP headers, under names that the user chooses."""

_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_QUERY = re.compile(r"(https?://[^\s?#]+)[?#]\S*")
_KEY = re.compile(r"\b(?:sk-|hf_|ghp_|gsk_|xai-|AIza)[\w-]{16,}")


def open_configuration(folder: str | Path) -> Records:
    """Return this process's writer of configurations for a records folder."""
    return records(Path(folder) / CONFIG)


def config_row(config: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the row of a configuration, which is of nested mappings, lists and scalars.

    ``step`` is the first training step of the process.

    Example::

        >>> config_row({"trainer": {"nnodes": 1}, "hf_token": "hf_1"}, step=5)["options"]
        {'trainer.nnodes': 1, 'hf_token': '[not recorded]'}
    """
    options = public_options(config)
    kept: dict[str, Any] = {}
    size = 0
    for name, value in options.items():
        size += len(encode([name, value]))
        if size > MAX_BYTES:
            break
        kept[name] = value
    return new_row(CONFIG, step=step, options=kept, omitted=len(options) - len(kept))


def hide_environment() -> None:
    """Hide the values of environment variables with the name of a secret, in all records of this process.

    Paths of files and folders are not hidden: other options contain them, too.
    """
    for name, value in os.environ.items():
        if _is_secret(name) and not os.path.exists(value):
            hide(value)


def public_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by their dotted names, without secrets. Lists are values; long values are cut."""
    return {name: _short(value) for name, value in _flat(config, "")}


def configurations(folder: Path) -> list[dict[str, Any]]:
    """Return the configurations in a records folder by time, each with ``time``, ``step``, ``options`` and ``omitted``.

    Raises:
        ConfigError: a newer version has written them.
    """
    rows = (row for row in read_rows(folder / CONFIG) if row.get("kind") == CONFIG)
    found = [{name: row.get(name) for name in ("time", "step", "options", "omitted")} for row in rows]
    return sorted(found, key=lambda row: row["time"] or 0.0)


def _flat(value: Any, name: str, is_hidden: bool = False) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            path = f"{name}.{key}" if name else str(key)
            yield from _flat(inner, path, is_hidden or _is_secret(str(key)) or _last(name).lower() in _OPEN_GROUPS)
    else:
        is_key = isinstance(value, str) and _KEY_NAME.search(_words(_last(name))) and not _WORD.fullmatch(value)
        yield name, _without_secrets(value, is_hidden or bool(is_key))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_secret(name: str) -> bool:
    words = _words(name)
    # An option such as `api_key_env` names an environment variable.
    return not words.endswith("_env") and _SECRET_NAME.search(words) is not None


def _words(name: str) -> str:
    """Return a name such as ``apiKey`` or ``api-key`` as ``api_key``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")


def _without_secrets(value: Any, is_hidden: bool) -> Any:
    if isinstance(value, Mapping):  # within a list
        return dict(_flat(value, "", is_hidden)) if value else {}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_secrets(item, is_hidden) for item in value]
    if value is None or isinstance(value, bool):
        return value
    # Before numbers: a password may consist of digits.
    if is_hidden:
        return NOT_RECORDED
    if isinstance(value, int | float):
        return value
    text = _IN_URL.sub(NOT_RECORDED, str(value))
    return _KEY.sub(NOT_RECORDED, _QUERY.sub(r"\1", text))


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else encode(value).decode()
    if len(text) <= MAX_VALUE:
        return value
    # Two values that differ only after the cut are different options.
    digest = f" (sha256 {sha256(text.encode(errors='backslashreplace')).hexdigest()[:12]})"
    return cut(text, MAX_VALUE - len(digest)) + digest
