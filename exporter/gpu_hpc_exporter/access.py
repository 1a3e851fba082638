"""Who may ask: TLS, client certificates and users of `--web.config.file`, which is read again when a file changes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import bcrypt

from gpu_hpc_exporter.web_config import RateLimit, WebConfig, header_values, load_web_config, named_files, tls_context
from gpu_hpc_exporter.yaml_file import ConfigError

log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0
"""Files are looked at for a new connection, at most this often."""
_PATIENCE_S: Final = 0.5
"""How long a connection waits for that: a file system that hangs must not end the service."""
_MAX_PROBLEM: Final = 400

_WORKERS: Final = 2
_MAX_WAITING: Final = 8
"""Requests of one peer that may wait for bcrypt; one of them at a time gets a worker."""
_MAX_KNOWN: Final = 256
_KNOWN_S: Final = 600.0
"""A password that was right is believed for so long after its last use."""
_BCRYPT_BYTES: Final = 72
"""bcrypt never looks at more of a password."""
_DEFAULT_COST: Final = 10

Stamp = tuple[int, int, int, int] | None
"""What changes with a file's content, None where there is none."""


class BusyError(Exception):
    """A peer has too many passwords waiting to be checked."""


@dataclass(slots=True)
class _Lane:
    """The requests of one peer: one at a time gets to the workers, so that none takes all of them."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Users:
    """Names and bcrypt hashes. bcrypt runs in threads of its own, in one for each peer that asks."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self.hashes = dict(hashes)
        self._hashes = {name.encode(): hashed.encode() for name, hashed in hashes.items()}
        # What an unknown user's password is compared with, so that the answer takes as long as a known one's.
        cost = max((int(hashed[4:6]) for hashed in hashes.values()), default=_DEFAULT_COST)
        self._dummy = bcrypt.gensalt(cost) + b"." * 31
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._lanes: dict[str, _Lane] = {}
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="bcrypt")

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def admits(self, authorization: str, peer: str) -> bool:
        """Whether a request's Authorization header has a user and the right password. Raises BusyError."""
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        # A name holds no colon, so that `name:password` has one meaning. The key keeps memory free of passwords.
        digest = hmac.digest(self._key, credentials, "sha256")
        return self._is_known(digest) or await self._ask_bcrypt(credentials, digest, peer)

    async def _ask_bcrypt(self, credentials: bytes, digest: bytes, peer: str) -> bool:
        lane = self._lanes.setdefault(peer, _Lane())
        if lane.waiting >= _MAX_WAITING:
            raise BusyError
        lane.waiting += 1
        try:
            async with lane.turn:
                if self._is_known(digest):  # by the request before
                    return True
                name, _, password = credentials.partition(b":")
                is_right = await asyncio.get_running_loop().run_in_executor(self._pool, self._matches, name, password)
        finally:
            lane.waiting -= 1
            if not lane.waiting:
                self._lanes.pop(peer, None)
        if is_right:
            self._remember(digest)
        return is_right

    def _matches(self, name: bytes, password: bytes) -> bool:
        """One bcrypt, whoever is named. In a worker."""
        hashed = self._hashes.get(name)
        return bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed or self._dummy) and hashed is not None

    def _is_known(self, digest: bytes) -> bool:
        if self._known.get(digest, 0.0) <= time.monotonic():
            return False
        self._remember(digest)
        return True

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = time.monotonic() + _KNOWN_S
        self._known.move_to_end(digest)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def _credentials(authorization: str) -> bytes | None:
    """`name:password` of a header of the scheme Basic, None of any other."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if b":" in decoded else None


class _Bucket:
    """Tokens that come at an interval, up to a burst; a request takes one."""

    def __init__(self, limit: RateLimit) -> None:
        self._interval_s = limit.interval_s
        self._burst = limit.burst
        self._tokens = float(limit.burst)
        self._filled_at = time.monotonic()

    def take(self) -> bool:
        """Whether there was one, or no limit."""
        if not self._interval_s:
            return True
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) / self._interval_s)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True)
class Rules:
    """What a file said when it was read last without a mistake."""

    config: WebConfig
    tls: ssl.SSLContext | None
    headers: Mapping[str, str]
    users: Users | None
    bucket: _Bucket

    def is_allowed_certificate(self, certificate: Mapping[str, object] | None) -> bool:
        """Whether a verified client certificate, as ssl's getpeercert() gives it, has one of the names it must have."""
        allowed = self.config.tls_server_config.client_allowed_sans
        return not allowed or any(name in allowed for name in _names(certificate))


def _names(certificate: Mapping[str, object] | None) -> list[str]:
    names = (certificate or {}).get("subjectAltName", ())
    return [value for _, value in names] if isinstance(names, Sequence) else []


class Access:
    """The rules in force. A broken new file keeps the old ones, and says so once."""

    def __init__(self, path: Path | None) -> None:
        """Without a path everybody may ask. Raises ConfigError."""
        self._path = path
        self._lock = threading.Lock()
        self._stamps: dict[Path, Stamp] = {}
        self._checked_at = time.monotonic()
        # Its own, since a thread that a file system has caught stays caught.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="access")
        self._check: asyncio.Future[None] | None = None
        self.problem = ""
        """Why the newest files are not in force, "" where they are."""
        self.rules = _rules(path, WebConfig(), None) if path is None else self._read(path, None)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.rules.users is not None:
            self.rules.users.close()

    def reload(self) -> str:
        """Read the file again; why it could not be, or "". In a thread."""
        if self._path is None:
            return ""
        with self._lock:
            try:
                self.rules = self._read(self._path, self.rules)
                self.problem = ""
            except ConfigError as error:
                self.problem = str(error)[:_MAX_PROBLEM]
            return self.problem

    async def fresh_rules(self) -> Rules:
        """The rules for a new connection: files that have changed are read first, unless that takes too long."""
        if self._path is None:
            return self.rules
        is_checking = self._check is not None and not self._check.done()
        if not is_checking and time.monotonic() - self._checked_at >= _CHECK_S:
            self._checked_at = time.monotonic()
            self._check = asyncio.get_running_loop().run_in_executor(self._pool, self._read_if_changed, self._path)
        if self._check is not None and not self._check.done():
            await asyncio.wait([self._check], timeout=_PATIENCE_S)
        return self.rules

    def _read_if_changed(self, path: Path) -> None:
        if {file: _stamp(file) for file in self._stamps} == self._stamps:
            return
        problem = self.reload()
        if problem:
            log.error("the web configuration stays as it was: %s", problem)
        else:
            log.info("%s or a file that it names has changed: reloaded", path)

    def _read(self, path: Path, before: Rules | None) -> Rules:
        # Each file's stamp before what it says, so that a change in between is seen as one at the next look.
        stamps = {**self._stamps, path: _stamp(path)}
        try:
            config = load_web_config(path)
            stamps = {path: stamps[path], **{file: _stamp(file) for file in named_files(path, config)}}
            return _rules(path, config, before)
        finally:
            self._stamps = stamps


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _rules(path: Path | None, config: WebConfig, before: Rules | None) -> Rules:
    tls = None if path is None else tls_context(path, config)
    users = before.users if before else None
    if (users.hashes if users else {}) != config.basic_auth_users:
        users = Users(config.basic_auth_users) if config.basic_auth_users else None
    bucket = before.bucket if before and before.config.rate_limit == config.rate_limit else _Bucket(config.rate_limit)
    return Rules(config, tls, header_values(config.http_server_config.headers), users, bucket)
