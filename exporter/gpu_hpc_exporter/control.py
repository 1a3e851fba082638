"""Asks the exporter that runs on this machine to pause, resume or release; what its command line does for people."""

from __future__ import annotations

import http.client
import ssl
import sys
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.http_client import read_http_client

_TIMEOUT_S: Final = 15.0
_MAX_ANSWER: Final = 4096


def ask(address: tuple[str | None, int], path: str, config_file: Path | None = None) -> int:
    """POST to the exporter, print what it answers and return the exit status: 0 when it was done, 1 when not.

    Raises ConfigError for the file.
    """
    host, port = address[0] or "127.0.0.1", address[1]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    client = read_http_client(config_file)
    connection: http.client.HTTPConnection | None = None
    try:
        connection = client.connect(host, port, _TIMEOUT_S)
        connection.request("POST", path, headers=client.headers)
        answer = connection.getresponse()
        text = answer.read(_MAX_ANSWER).decode("utf-8", "replace").strip()
    except TimeoutError:
        return _complain(f"the exporter at {place} does not answer within {_TIMEOUT_S:g} s")
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or (error.reason or "").replace("_", " ").lower()
        return _complain(f"no TLS with what answers at {place}: {why}; see --http.config.file")
    except http.client.RemoteDisconnected:
        return _complain(f"what answers at {place} ends the connection: does it want TLS? see --http.config.file")
    except OSError:
        return _complain(f"no exporter answers at {place}: is it running? see --address")
    except http.client.HTTPException:
        return _complain(f"what answers at {place} is no exporter: see --address")
    finally:
        if connection is not None:
            connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        return _complain(f"the exporter at {place} asks for a user and a password: see --http.config.file")
    if answer.status != http.client.OK:
        return _complain(_one_line(text) or f"the exporter at {place} answers {answer.status}")
    sys.stdout.write(f"{_one_line(text)}\n")
    return 0


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _complain(text: str) -> int:
    sys.stderr.write(f"gpu-hpc-exporter: {text}\n")
    return 1
