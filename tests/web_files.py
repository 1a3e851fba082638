"""Certificates, users and the files that name them, as an administrator would lay them out."""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import trustme

PASSWORD = "geheim: ¡100%!"  # noqa: S105  of a server that lives for a test
WITH_TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
WITH_CLIENTS = (
    "tls_server_config: {cert_file: server.pem, key_file: server.key, client_ca_file: ca.pem, "
    "client_auth_type: RequireAndVerifyClientCert}\n"
)


def hash_of(password: str = PASSWORD, cost: int = 4) -> str:
    """A bcrypt hash, by default a cheap one."""
    # Always the same salt: hashes stand in the names of tests, which must be the same in every worker.
    return bcrypt.hashpw(password.encode(), f"$2b${cost:02}$SERXMoLuMU/HXx3tIQNDJ.".encode()).decode()


def with_users(cost: int = 4, **passwords: str) -> str:
    """The section of users, by default one called scraper."""
    lines = [
        f"  {name}: {hash_of(password, cost)}\n" for name, password in (passwords or {"scraper": PASSWORD}).items()
    ]
    return "basic_auth_users:\n" + "".join(lines)


def basic(user: str = "scraper", password: str = PASSWORD) -> str:
    """The header's value."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@dataclass(frozen=True)
class Site:
    """A directory with an authority, a server's certificate and the file for --web.config.file."""

    directory: Path
    ca: trustme.CA

    @property
    def flag(self) -> str:
        """What the exporter is started with."""
        return f"--web.config.file={self.file}"

    @property
    def file(self) -> Path:
        """The file."""
        return self.directory / "web.yml"

    def write(self, text: str) -> None:
        """Replace the file as a whole, as editors do."""
        _replace(self.file, text.encode())

    def issue(self, name: str = "server", *identities: str) -> trustme.LeafCert:
        """Write NAME.pem and NAME.key, the key first."""
        leaf = self.ca.issue_cert(*(identities or ("127.0.0.1", "localhost")))
        _replace(self.directory / f"{name}.key", leaf.private_key_pem.bytes())
        _replace(self.directory / f"{name}.pem", leaf.cert_chain_pems[0].bytes())
        return leaf

    def client(self, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """A client that trusts the authority and, perhaps, shows a certificate."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        return context


def make_site(directory: Path, text: str) -> Site:
    """A site whose file has this text."""
    site = Site(directory, trustme.CA())
    site.ca.cert_pem.write_to_path(directory / "ca.pem")
    site.issue()
    site.write(text)
    return site


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.replace(path)
