"""API keys: made here, shown once, and kept only as hashes.

A key is 256 random bits, so a plain SHA-256 of it tells nothing: there is no list of likely keys to try. The file is
JSON, is read again when it has changed, and is only ever replaced as a whole.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from offramp.common.errors import OfframpError
from offramp.serve.http.settings import first_fault

log = logging.getLogger(__name__)

KeyUse = Literal["api", "metrics"]
"""What a key is for: whoever asks a model need not know how much others ask, and whoever watches need not ask."""

PREFIX = "offramp-"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_LOOK_EVERY_S = 1.0


class ApiKey(BaseModel):
    """A key as the file has it.

    Attributes:
        name: Whose it is; for the access log.
        sha256: Of the key, in hexadecimal digits.
        created: When it was made, in ISO 8601.
        use: What it is for.
        requests_per_minute: Most requests that it is good for in a minute; None is as many as there are.
        max_concurrent: Most of its requests that are answered at the same time; None is as many as there are.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=_NAME)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: str | None = None
    use: KeyUse = "api"
    requests_per_minute: int | None = Field(default=None, ge=1)
    max_concurrent: int | None = Field(default=None, ge=1)


class KeyRing(BaseModel):
    """All keys of a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    keys: tuple[ApiKey, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _each_name_once(self) -> KeyRing:
        for name, count in Counter(key.name for key in self.keys).items():
            if count > 1:
                raise ValueError(f"the name {name!r} is there twice")
        return self

    @classmethod
    def read(cls, path: Path) -> KeyRing:
        """Reads a file of keys.

        Raises:
            OfframpError: It cannot be read, or is no such file.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise OfframpError(
                f"the file of keys {path} cannot be read ({error.strerror}); make one with `offramp keys add`."
            ) from error
        except ValidationError as error:
            raise OfframpError(f"{path} is no file of keys: {first_fault(error)}.") from None

    def find(self, secret: str) -> ApiKey | None:
        """Whose key this is; None where it is nobody's."""
        digest = _digest(secret)
        # Only hashes are compared. How long that takes tells of hashes alone, and nobody can choose those; nor does it
        # tell of them.
        return next((key for key in self.keys if hmac.compare_digest(key.sha256, digest)), None)


class KeysFile:
    """A file of keys that may change while it is used.

    Args:
        path: The file.
        clock: Seconds.

    Raises:
        OfframpError: It cannot be read, or is no such file.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._stamp = self._look()
        self._looked = clock()
        self._ring = KeyRing.read(path)

    def find(self, secret: str) -> ApiKey | None:
        """Whose key this is, by a state of the file that is at most a second old."""
        if self._clock() - self._looked >= _LOOK_EVERY_S:
            self._looked = self._clock()
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._ring = KeyRing.read(self._path)
                except OfframpError as fault:
                    # Neither everybody nor nobody is let in because of a slip of the hand.
                    log.error("The keys stay as they were: %s", fault)
        return self._ring.find(secret)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def add_key(
    path: Path,
    name: str,
    *,
    use: KeyUse = "api",
    requests_per_minute: int | None = None,
    max_concurrent: int | None = None,
) -> str:
    """Makes a key and adds its hash to a file, which is made where there is none.

    Returns:
        The key. It is nowhere else.

    Raises:
        OfframpError: The name is taken or no name, a limit is below 1, or the file cannot be read or written.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    try:
        key = ApiKey(
            name=name,
            sha256=_digest(secret),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            use=use,
            requests_per_minute=requests_per_minute,
            max_concurrent=max_concurrent,
        )
    except ValidationError as error:
        raise OfframpError(f"the key cannot be made: {first_fault(error)}.") from None
    with _locked(path):
        ring = KeyRing.read(path) if path.exists() else KeyRing()
        if any(other.name == name for other in ring.keys):
            raise OfframpError(f"{path} has a key named {name!r} already; remove it first, or choose another name.")
        _write(path, KeyRing(keys=(*ring.keys, key)))
    return secret


def remove_key(path: Path, name: str) -> None:
    """Takes a key out of a file; gateways that use it refuse the key a second later.

    Raises:
        OfframpError: There is none of this name, or the file cannot be read or written.
    """
    with _locked(path):
        ring = KeyRing.read(path)
        left = tuple(key for key in ring.keys if key.name != name)
        if len(left) == len(ring.keys):
            names = ", ".join(key.name for key in ring.keys) or "none"
            raise OfframpError(f"{path} has no key named {name!r}; it has: {names}.")
        _write(path, KeyRing(keys=left))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _locked(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path.with_name(f"{path.name}.lock"))
    except OSError as error:
        raise OfframpError(f"{path} cannot be written ({error.strerror}); choose another place.") from error


def _write(path: Path, ring: KeyRing) -> None:
    text = json.dumps(ring.model_dump(exclude_none=True), indent=2) + "\n"
    try:
        number, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable by its owner alone
        with os.fdopen(number, "w") as file:
            file.write(text)
        os.replace(scratch, path)
    except OSError as error:
        raise OfframpError(f"{path} cannot be written ({error.strerror}); choose another place.") from error
