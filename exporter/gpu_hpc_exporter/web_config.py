"""The file of `--web.config.file`, in the format of Prometheus's exporter-toolkit: TLS, headers, users."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from gpu_hpc_exporter.yaml_file import ConfigError, YamlFile, read_small_file, read_yaml

TlsVersion = Literal["TLS10", "TLS11", "TLS12", "TLS13"]
ClientAuth = Literal[
    "NoClientCert",
    "RequestClientCert",
    "RequireClientCert",
    "RequireAnyClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
]
Curve = Literal["CurveP256", "CurveP384", "CurveP521", "X25519"]

_VERSIONS: Final[Mapping[TlsVersion, ssl.TLSVersion]] = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_CURVES: Final[Mapping[Curve, str]] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
_CIPHERS: Final[Mapping[str, str]] = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
"""OpenSSL's names of the suites that Go calls safe, all of TLS 1.2."""
_TLS13_CIPHERS: Final = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Allowed in the list and without effect there, as in Go: TLS 1.3 offers them all."""
_UNVERIFIED: Final = ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert")

MAX_COST: Final = 16
"""A check of a password that costs 2^16 rounds takes about 5 s; each one more doubles it."""
_HASH: Final = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{53}")
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)|0")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class TlsServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS. Certificates in PEM form, from a file or from the text itself; relative names are of the file's directory.

    client_auth_type: of Go's, those that verify a certificate, which are all that Python's ssl can.
    client_allowed_sans: names of which a client's certificate must have one (DNS, IP, e-mail or URI).
    cipher_suites: Go's names, for TLS 1.2.
    curve_preferences: at most one, which is all that Python's ssl can set.
    """

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: ClientAuth = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[Curve, ...] = ()

    @property
    def is_enabled(self) -> bool:
        """Whether anything here asks for TLS."""
        files = (self.cert, self.key, self.client_ca, self.cert_file, self.key_file, self.client_ca_file)
        return any(files) or self.client_auth_type != "NoClientCert"


def _capital(word: str) -> str:
    return word.upper() if word == "xss" else word.capitalize()


class Headers(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename=lambda name: "-".join(map(_capital, name.split("_"))),
):
    """Headers that may be added to answers, or replace what is sent by default."""

    content_security_policy: str = ""
    x_frame_options: Literal["", "deny", "sameorigin"] = ""
    x_content_type_options: Literal["", "nosniff"] = ""
    x_xss_protection: str = ""
    strict_transport_security: str = ""


class HttpServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """HTTP. http2: understood and without effect, since HTTP/1.1 is all that is spoken here."""

    http2: bool = True
    headers: Headers = Headers()


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of all clients together. interval: time for one, "0" for no limit; burst: how many at once."""

    interval: str = "0"
    burst: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def interval_s(self) -> float:
        """Seconds."""
        match = _DURATION.fullmatch(self.interval)
        return float(match[1]) * _SECONDS[match[2]] if match and match[1] else 0.0


class WebConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. basic_auth_users: bcrypt hashes by name; without any, nobody is asked who they are."""

    tls_server_config: TlsServer = TlsServer()
    http_server_config: HttpServer = HttpServer()
    basic_auth_users: dict[str, str] = {}
    rate_limit: RateLimit = RateLimit()


def load_web_config(path: Path) -> WebConfig:
    """Read and check the file, though not those that it names. Raises ConfigError."""
    # A user without a hash, or a `client_ca_file` without a value, is a mistake that must not open a door.
    file = read_yaml(path, WebConfig, empty_is_absent=False)
    _check_users(file)
    _check_headers(file)
    _check_tls(file)
    limit = file.value.rate_limit
    if not _DURATION.fullmatch(limit.interval):
        raise file.mistake(["rate_limit", "interval"], "expected a time such as 500ms, 1s or 2m, or 0")
    if limit.interval_s and not limit.burst:
        raise file.mistake(["rate_limit"], "a burst of 0 would refuse every request")
    return file.value


def _check_users(file: YamlFile[WebConfig]) -> None:
    for name, hashed in file.value.basic_auth_users.items():
        match = _HASH.fullmatch(hashed)
        keys = ["basic_auth_users", name]
        if not name or ":" in name or not name.isprintable():
            raise file.mistake(keys, "no HTTP client can send this name")
        if not match:
            raise file.mistake(keys, 'expected a bcrypt hash, as `htpasswd -nBC 10 ""` makes them after the colon')
        if not 4 <= int(match[1]) <= MAX_COST:
            raise file.mistake(keys, f"the hash's cost is {match[1]}: expected 04 to {MAX_COST}; 10 is usual")


def _check_headers(file: YamlFile[WebConfig]) -> None:
    headers = file.value.http_server_config.headers
    for name, value in header_values(headers).items():
        if not (value.isascii() and value.isprintable()):
            raise file.mistake(["http_server_config", "headers", name], "expected printable ASCII text")


def header_values(headers: Headers) -> dict[str, str]:
    """Those that are set, by the name that is sent."""
    pairs = zip(headers.__struct_encode_fields__, msgspec.structs.astuple(headers), strict=True)
    return {name: value for name, value in pairs if value}


def _check_tls(file: YamlFile[WebConfig]) -> None:
    tls = file.value.tls_server_config
    for key, problem in (*_certificate_mistakes(tls), *_client_mistakes(tls), *_choice_mistakes(tls)):
        raise file.mistake(["tls_server_config", key] if key else ["tls_server_config"], problem)


def _certificate_mistakes(tls: TlsServer) -> Iterator[tuple[str, str]]:
    """Key and problem, as of the next two."""
    if not tls.is_enabled and tls != TlsServer():
        yield "", "without cert_file and key_file there is no TLS to set up"
    for inline, named in (("cert", "cert_file"), ("key", "key_file"), ("client_ca", "client_ca_file")):
        has_inline, has_named = bool(getattr(tls, inline)), bool(getattr(tls, named))
        if has_inline and has_named:
            yield inline, f"stands beside {named}: expected one of the two"
        if tls.is_enabled and inline != "client_ca" and not (has_inline or has_named):
            yield "", f"{named} is missing"


def _client_mistakes(tls: TlsServer) -> Iterator[tuple[str, str]]:
    has_ca = bool(tls.client_ca or tls.client_ca_file)
    if tls.client_auth_type in _UNVERIFIED:
        known = "expected RequireAndVerifyClientCert or VerifyClientCertIfGiven"
        yield "client_auth_type", f"{tls.client_auth_type} verifies nothing, which Python's ssl cannot: {known}"
    if has_ca and tls.client_auth_type == "NoClientCert":
        yield "client_ca_file" if tls.client_ca_file else "client_ca", "has no effect without client_auth_type"
    if not has_ca and tls.client_auth_type != "NoClientCert":
        yield "client_auth_type", f"{tls.client_auth_type} needs client_ca_file"
    if tls.client_allowed_sans and tls.client_auth_type != "RequireAndVerifyClientCert":
        yield "client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert"


def _choice_mistakes(tls: TlsServer) -> Iterator[tuple[str, str]]:
    known = (*_CIPHERS, *_TLS13_CIPHERS)
    if tls.min_version > tls.max_version:
        yield "min_version", f"{tls.min_version} is above max_version, {tls.max_version}"
    for suite in tls.cipher_suites:
        if suite not in known:
            yield "cipher_suites", f"unknown suite `{suite}`; known: {', '.join(known)}"
    if len(tls.curve_preferences) > 1:
        yield "curve_preferences", "Python's ssl can set one curve: name one, or none for OpenSSL's own order"


def named_files(path: Path, config: WebConfig) -> tuple[Path, ...]:
    """The files that the file at `path` names: a change of one is a change of what it says."""
    tls = config.tls_server_config
    return tuple(path.parent / name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name)


def tls_context(path: Path, config: WebConfig) -> ssl.SSLContext | None:
    """What connections are accepted with, None for plain HTTP. `path` is the file's own. Raises ConfigError."""
    tls = config.tls_server_config
    if not tls.is_enabled:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    context.set_alpn_protocols(["http/1.1"])
    if not tls.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    suites = [_CIPHERS[suite] for suite in tls.cipher_suites if suite in _CIPHERS]
    if suites:
        context.set_ciphers(":".join(suites))
    for curve in tls.curve_preferences:
        context.set_ecdh_curve(_CURVES[curve])
    _load_certificate(context, path, tls)
    if tls.client_auth_type != "NoClientCert":
        _load_client_ca(context, path, tls)
        is_required = tls.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    return context


def _load_certificate(context: ssl.SSLContext, path: Path, tls: TlsServer) -> None:
    cert_name, key_name = (str(path.parent / name) if name else str(path) for name in (tls.cert_file, tls.key_file))
    cert, key = _pem(path, tls.cert, tls.cert_file), _pem(path, tls.key, tls.key_file)
    with _as_file(cert) as cert_path, _as_file(key) as key_path:
        try:
            context.load_cert_chain(cert_path, key_path, password=_no_password)
        except _EncryptedError as error:
            raise ConfigError(f"{key_name}: the key is encrypted: expected one without a password") from error
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{cert_name} and {key_name}: {_why(error)}") from error


def _load_client_ca(context: ssl.SSLContext, path: Path, tls: TlsServer) -> None:
    name = str(path.parent / tls.client_ca_file) if tls.client_ca_file else str(path)
    try:
        context.load_verify_locations(cadata=_pem(path, tls.client_ca, tls.client_ca_file).decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{name}: no certificate in PEM form that client_auth_type could verify with") from error


def _pem(path: Path, text: str, name: str) -> bytes:
    return text.encode() if text else read_small_file(path.parent / name)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path of `content` in memory, which is all that Python's ssl loads a key from."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class _EncryptedError(Exception):
    """A key asked for its password, which OpenSSL would otherwise ask of the terminal."""


def _no_password() -> str:
    raise _EncryptedError


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    if reason is None or reason in ("NO_START_LINE", "PEM"):
        return "no certificate and key in PEM form"
    return f"cannot be loaded: {reason.replace('_', ' ').lower()}"
