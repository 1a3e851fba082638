"""Whom a connection is counted for."""

from __future__ import annotations

import pytest

from gpu_hpc_exporter.connections import peer_of


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_peers(host: str, peer: str) -> None:
    """An IPv4 address however it is written; of IPv6 the 64 bits that one host may have all addresses of."""
    assert peer_of(host) == peer
