"""Where to ask on this node, out of configuration and environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_hpc_exporter import config
from gpu_hpc_exporter.sources.kubernetes.client import Server
from gpu_hpc_exporter.sources.kubernetes.objects import Wanted
from gpu_hpc_exporter.sources.kubernetes.podresources import DEADLINE_S, SOCKET
from gpu_hpc_exporter.sources.kubernetes.text import clean

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_NODE: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Which node's pods to read, from where, and what of them to keep."""

    server: Server
    node: str
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """api: None without an API server; then `no_api_reason` says why.

    gpu_resources: renamed resources that are GPUs. refresh_s: how often the kubelet is asked; gap_s: at least between
    two times. keep_s: how long the last answer of a peer that has fallen silent is believed.
    """

    socket: Path = SOCKET
    api: ApiSettings | None = None
    no_api_reason: str = "not configured"
    gpu_resources: tuple[str, ...] = ()
    refresh_s: float = 10.0
    gap_s: float = 2.0
    deadline_s: float = DEADLINE_S
    keep_s: float = 120.0


def settings_of(
    configured: config.Kubernetes,
    environ: Mapping[str, str],
    host_name: str,
    service_account: Path = SERVICE_ACCOUNT,
) -> KubernetesSettings:
    """What the configuration means here."""
    socket, resources = Path(configured.socket), configured.gpu_resources
    server, reason = _server(configured, environ, service_account)
    node = configured.node_name or environ.get("NODE_NAME") or host_name.lower()
    if server is not None and not _NODE.fullmatch(node):
        server, reason = None, f"`{clean(node)}` is no node's name: set NODE_NAME to spec.nodeName"
    if server is None:
        return KubernetesSettings(socket, None, reason, resources)
    api = ApiSettings(server, node, Wanted(configured.labels, configured.annotations))
    return KubernetesSettings(socket, api, gpu_resources=resources)


def _server(
    configured: config.Kubernetes, environ: Mapping[str, str], service_account: Path
) -> tuple[Server | None, str]:
    """The server, or why there is none."""
    if configured.api == "off":
        return None, "switched off: jobs.kubernetes.api"
    token, authority = _existing(service_account / "token"), _existing(service_account / "ca.crt")
    if configured.api != "auto":
        if configured.api.startswith("http:"):
            token = None  # it would go over a connection that others can read, unless it is configured
        token = Path(configured.token_file) if configured.token_file else token
        authority = Path(configured.ca_file) if configured.ca_file else authority
        return Server(configured.api.rstrip("/"), token, authority), ""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None, "not in a pod (no KUBERNETES_SERVICE_HOST), and no jobs.kubernetes.api is configured"
    if token is None:
        return None, f"no token in {service_account}: the pod has automountServiceAccountToken: false"
    return Server(f"https://{f'[{host}]' if ':' in host else host}:{port}", token, authority), ""


def _existing(path: Path) -> Path | None:
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # told when it is read
    return path
