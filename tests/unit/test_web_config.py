"""`--web.config.file`: what is understood, what each mistake is told as, and what becomes of it in TLS."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.web_config import WebConfig, header_values, load_web_config, tls_context
from gpu_hpc_exporter.yaml_file import ConfigError
from web_files import WITH_CLIENTS, WITH_TLS, Site, hash_of, make_site

HASH = hash_of()
OF_HTPASSWD = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


def load(directory: Path, text: str) -> WebConfig:
    """What a file of this text says."""
    file = directory / "web.yml"
    file.write_text(text, encoding="utf-8")
    return load_web_config(file)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Files to name."""
    return make_site(tmp_path, WITH_TLS)


def context_of(site: Site, text: str) -> ssl.SSLContext:
    """The context that a file of this text leads to."""
    site.write(text)
    context = tls_context(site.file, load_web_config(site.file))
    assert context is not None
    return context


def test_everything_of_the_format(tmp_path: Path) -> None:
    """All keys that exporter-toolkit documents are known, and two kinds of bcrypt hashes."""
    config = load(
        tmp_path,
        f"""
tls_server_config:
  cert_file: server.pem
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  client_allowed_sans: [prometheus.example]
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: true
  curve_preferences: [CurveP256]
http_server_config:
  http2: true
  headers:
    Content-Security-Policy: default-src 'self'
    X-Frame-Options: sameorigin
    X-Content-Type-Options: nosniff
    X-XSS-Protection: 1; mode=block
    Strict-Transport-Security: max-age=31536000
basic_auth_users:
  alice: {HASH}
  bob: {OF_HTPASSWD}
rate_limit: {{interval: 100ms, burst: 20}}
""",
    )
    assert config.tls_server_config.client_allowed_sans == ("prometheus.example",)
    assert header_values(config.http_server_config.headers) == {
        "Content-Security-Policy": "default-src 'self'",
        "X-Frame-Options": "sameorigin",
        "X-Content-Type-Options": "nosniff",
        "X-XSS-Protection": "1; mode=block",
        "Strict-Transport-Security": "max-age=31536000",
    }
    assert config.basic_auth_users == {"alice": HASH, "bob": OF_HTPASSWD}
    assert config.rate_limit.interval_s == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["", "tls_server_config:\nbasic_auth_users:\n", "# nothing\n"])
def test_nothing_asks_for_nothing(tmp_path: Path, text: str) -> None:
    """An empty file, or one of empty sections, is plain HTTP for everybody."""
    config = load(tmp_path, text)
    assert config == WebConfig()
    assert tls_context(tmp_path / "web.yml", config) is None


TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  "


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tls_config: {}\n", "line 1: unknown key `tls_config`; did you mean `tls_server_config`?"),
        (TLS + "certfile: x\n", "line 4: unknown key `tls_server_config.certfile`; did you mean `cert_file`?"),
        (
            "http_server_config:\n  headers:\n    X-Powered-By: me\n",
            "line 3: unknown key `http_server_config.headers.X-Powered-By`; known keys: Content-Security-Policy, ",
        ),
        (
            "http_server_config:\n  headers:\n    X-Frame-Options: allowall\n",
            "line 3: http_server_config.headers.X-Frame-Options: ",
        ),
        (
            'http_server_config:\n  headers:\n    X-XSS-Protection: "0\\r\\nSet-Cookie: a=b"\n',
            "line 3: http_server_config.headers.X-XSS-Protection: expected printable ASCII text",
        ),
        ("tls_server_config:\n  cert_file: a\n", "line 1: tls_server_config: key_file is missing"),
        ("tls_server_config:\n  key_file: a\n", "line 1: tls_server_config: cert_file is missing"),
        ("tls_server_config: {min_version: TLS13}\n", "line 1: tls_server_config: without cert_file and key_file "),
        (TLS + "cert: x\n", "line 4: tls_server_config.cert: stands beside cert_file: expected one of the two"),
        (TLS + "client_auth_type: Maybe\n", "line 4: tls_server_config.client_auth_type: "),
        (
            TLS + "client_auth_type: RequireAnyClientCert\n",
            "line 4: tls_server_config.client_auth_type: RequireAnyClientCert verifies nothing, which Python's ssl ",
        ),
        (TLS + "client_auth_type: RequireAndVerifyClientCert\n", "line 4: tls_server_config.client_auth_type: Requir"),
        (TLS + "client_ca_file: ca.pem\n", "line 4: tls_server_config.client_ca_file: has no effect without client_"),
        (TLS + "client_allowed_sans: [a]\n", "line 4: tls_server_config.client_allowed_sans: needs client_auth_type"),
        (TLS + "min_version: TLS13\n  max_version: TLS12\n", "line 4: tls_server_config.min_version: TLS13 is above"),
        (TLS + "min_version: SSL3\n", "line 4: tls_server_config.min_version: "),
        (TLS + "cipher_suites: [RC4]\n", "line 4: tls_server_config.cipher_suites: unknown suite `RC4`; known: TLS_"),
        (TLS + "curve_preferences: [X25519, CurveP256]\n", "line 4: tls_server_config.curve_preferences: Python's "),
        ("basic_auth_users:\n  alice: secret\n", "line 2: basic_auth_users.alice: expected a bcrypt hash, as "),
        ("basic_auth_users:\n  alice:\n", "line 2: basic_auth_users.alice: expected a bcrypt hash, as "),
        (f"basic_auth_users:\n  a:b: {HASH}\n", "line 2: basic_auth_users.a:b: no HTTP client can send this name"),
        (
            f"basic_auth_users:\n  alice: $2b$17${HASH[7:]}\n",
            "line 2: basic_auth_users.alice: the hash's cost is 17: expected 04 to 16; 10 is usual",
        ),
        (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n", "line 3: key `a` stands here twice"),
        ("basic_auth_users: [alice]\n", "line 1: basic_auth_users: "),
        ("rate_limit: {interval: often, burst: 1}\n", "line 1: rate_limit.interval: expected a time such as "),
        ("rate_limit: {interval: 1s}\n", "line 1: rate_limit: a burst of 0 would refuse every request"),
        ("rate_limit: {interval: 1s, burst: -1}\n", "line 1: rate_limit.burst: "),
    ],
)
def test_mistakes(tmp_path: Path, text: str, problem: str) -> None:
    """Each is one line with file, line number and key, and never has a hash or a key in it."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'web.yml'}: {problem}")
    assert "\n" not in told
    assert HASH[20:] not in told


@given(st.binary(max_size=400) | st.text(max_size=400).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_configuration_or_a_mistake(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Nothing but ConfigError comes of a broken file."""
    file = tmp_path_factory.getbasetemp() / "any.yml"
    file.write_bytes(content)
    told = ""
    try:
        load_web_config(file)
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told


def test_versions_ciphers_and_clients(site: Site) -> None:
    """What is chosen in the file is what OpenSSL is told."""
    text = WITH_CLIENTS.replace("}", ", min_version: TLS13, curve_preferences: [CurveP384]}")
    context = context_of(site, text)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    text = WITH_TLS.replace(
        "}", ", cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256], max_version: TLS12}"
    )
    context = context_of(site, text)
    assert context.maximum_version == ssl.TLSVersion.TLSv1_2
    names = {cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] == "TLSv1.2"}
    assert names == {"ECDHE-ECDSA-CHACHA20-POLY1305"}
    assert context.verify_mode == ssl.CERT_NONE
    optional = WITH_CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    assert context_of(site, optional).verify_mode == ssl.CERT_OPTIONAL


def test_certificates_in_the_file_itself(site: Site) -> None:
    """`cert`, `key` and `client_ca` hold what the files would."""
    names = {"cert": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    parts = [f"  {key}: |\n" + _indented(site.directory / name) for key, name in names.items()]
    context = context_of(
        site, "tls_server_config:\n" + "".join(parts) + "  client_auth_type: RequireAndVerifyClientCert\n"
    )
    assert len(context.get_ca_certs()) == 1


def _indented(file: Path) -> str:
    return "".join(f"    {line}\n" for line in file.read_text().splitlines())


def _spoil(site: Site, how: str) -> None:
    key = site.directory / "server.key"
    if how == "other key":
        key.write_bytes(site.ca.issue_cert("other").private_key_pem.bytes())
    elif how == "encrypted key":
        plain = load_pem_private_key(key.read_bytes(), None)
        locked = plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
        key.write_bytes(locked)
    elif how == "no PEM":
        (site.directory / "server.pem").write_bytes(b"\x00\xff" * 100)
    elif how == "no file":
        key.unlink()
    elif how == "FIFO":
        key.unlink()
        os.mkfifo(key)
    else:
        (site.directory / "ca.pem").write_text("nothing\n")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("other key", "server.pem and {}/server.key: the key does not belong to the certificate"),
        ("encrypted key", "server.key: the key is encrypted: expected one without a password"),
        ("no PEM", "server.pem and {}/server.key: no certificate and key in PEM form"),
        ("no file", "server.key: No such file or directory"),
        ("FIFO", "server.key: is no regular file"),
        ("no CA", "ca.pem: no certificate in PEM form that client_auth_type could verify with"),
    ],
)
def test_files_that_cannot_be_used(site: Site, how: str, problem: str) -> None:
    """Each is named with what is wrong; none makes OpenSSL ask a terminal for a password, or wait for ever."""
    site.write(WITH_CLIENTS)
    _spoil(site, how)
    with pytest.raises(ConfigError) as caught:
        tls_context(site.file, load_web_config(site.file))
    assert str(caught.value) == f"{site.directory}/{problem.format(site.directory)}"
