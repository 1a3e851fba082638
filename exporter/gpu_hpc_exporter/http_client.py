"""How to ask a server that wants TLS, a certificate or a password, in the form of Prometheus's HTTP clients."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpu_hpc_exporter.yaml_file import ConfigError, read_small_file, read_yaml


class BasicAuth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user of the exporter's --web.config.file."""

    username: str = ""
    password: str = ""
    password_file: str = ""


class TlsClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom to trust and who we are. server_name: whose certificate it must be; "" is the address asked."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    insecure_skip_verify: bool = False


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to ask, in the form of Prometheus's HTTP clients; relative names are of the file's directory."""

    basic_auth: BasicAuth | None = None
    tls_config: TlsClient | None = None


@dataclass(frozen=True, slots=True)
class HttpClient:
    """Makes connections. headers: what each request says of who asks; server_name: whose certificate it must be."""

    headers: dict[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    server_name: str = ""

    def connect(self, host: str, port: int, timeout_s: float) -> http.client.HTTPConnection:
        """A connection, by http.client, since a proxy from the environment must not come between. Raises OSError."""
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        plain = socket.create_connection((host, port), timeout=timeout_s)
        try:
            name = self.server_name or host
            connection.sock = plain if self.context is None else self.context.wrap_socket(plain, server_hostname=name)
        except BaseException:
            plain.close()
            raise
        return connection


def read_http_client(file: Path | None) -> HttpClient:
    """As a file says, by default without anything. Raises ConfigError."""
    if file is None:
        return HttpClient()
    config = read_yaml(file, HttpConfig).value
    tls = config.tls_config
    headers = _authorization(config.basic_auth, file.parent)
    return HttpClient(headers, _context(tls, file.parent), tls.server_name if tls is not None else "")


def _authorization(auth: BasicAuth | None, directory: Path) -> dict[str, str]:
    if auth is None:
        return {}
    password = auth.password
    if auth.password_file:
        file = directory / auth.password_file
        password = read_small_file(file).decode("utf-8", "replace").strip()
    encoded = base64.b64encode(f"{auth.username}:{password}".encode()).decode()
    return {"Authorization": f"Basic {encoded}"}


def _context(tls: TlsClient | None, directory: Path) -> ssl.SSLContext | None:
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(directory / tls.ca_file) if tls.ca_file else None)
        if tls.cert_file:
            context.load_cert_chain(directory / tls.cert_file, directory / (tls.key_file or tls.cert_file))
    except OSError as error:
        names = ", ".join(filter(None, (tls.ca_file, tls.cert_file, tls.key_file)))
        raise ConfigError(f"tls_config: {names} cannot be loaded: {error.strerror or error}") from error
    if tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
