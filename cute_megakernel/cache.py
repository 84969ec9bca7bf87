"""What took seconds to make, kept on disk for the next process: machine code, and which schedules were proved.

    data = load(key)                  None where it has to be made
    store(key, data)                  whole or not at all

A key is a line of JSON that names everything the data depends on; a file is named by its digest and holds key, data
and a digest of both. The directory is `KIMI_KERNELS_CACHE`, by default `kimi-kernels` in the user's cache directory;
it may be read-only, and deleted at any time.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

VARIABLE = "KIMI_KERNELS_CACHE"
logger = logging.getLogger(__name__)


def directory() -> Path:
    """Raises RuntimeError for a user without a home."""
    chosen, caches = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen)
    return (Path(caches) if caches else Path.home() / ".cache") / "kimi-kernels"


def key_of(kind: str, **parts) -> str:
    """`parts` and the sources of this package, as one line."""
    return json.dumps({"kind": kind, **parts, "sources": sources()}, sort_keys=True)


@functools.cache
def sources() -> str:
    """Digest of every file of this package: no data outlives a change of what made it."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def load(key: str) -> bytes | None:
    """What was stored under `key`. A damaged file, or one that another user may have written, counts as none."""
    try:
        path = directory() / _name(key)
        with path.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        logger.warning("the cache of kimi-kernels cannot be read: %s", error)
        return None
    head = content[: len(_seal(key, b""))]
    data = content[len(head) :]
    if owner not in (os.getuid(), 0) or head != _seal(key, data):
        logger.warning("%s is damaged or of another user; what it holds is made anew", path)
        return None
    return data


def store(key: str, data: bytes) -> None:
    """Keeps `data` for `load`, if the directory lets us; a reader sees all of it or nothing."""
    try:
        folder = directory()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            try:
                file.write(_seal(key, data) + data)
                file.flush()
                os.replace(file.name, folder / _name(key))
            except BaseException:
                os.unlink(file.name)
                raise
    except (OSError, RuntimeError) as error:
        logger.warning("the cache of kimi-kernels cannot be written: %s", error)


def _name(key: str) -> str:
    return f"{json.loads(key)['kind']}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _seal(key: str, data: bytes) -> bytes:
    """What a file begins with: digest of all that follows it, and the key."""
    line = key.encode() + b"\n"
    return hashlib.sha256(line + data).hexdigest().encode() + b"\n" + line
