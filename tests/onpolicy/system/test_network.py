"""Ports: which can be taken, and by whom they can be reached."""

import socket
from pathlib import Path

import pytest

from onpolicy.errors import ConfigError
from onpolicy.rollout.server import require_free_port
from onpolicy.system.network import free_port, is_loopback, listen

HOST = "127.0.0.1"


def test_a_port_whose_connections_have_just_ended_can_be_taken_again():
    """The side that closes first keeps the port in TIME_WAIT for a minute, as a stopped server does."""
    listener = listen(HOST, 0)
    port = listener.getsockname()[1]
    client = socket.create_connection((HOST, port))
    accepted, _ = listener.accept()
    for closed_in_this_order in (accepted, client, listener):
        closed_in_this_order.close()
    with socket.socket() as plain, pytest.raises(OSError, match="Address already in use"):
        plain.bind((HOST, port))
    require_free_port(HOST, port)


def test_a_port_that_somebody_listens_on_is_refused():
    with listen(HOST, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on {HOST} cannot be used"):
            require_free_port(HOST, port)


def test_free_ports_are_none_that_an_outgoing_connection_gets():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port(HOST) < min(first, 32000) for _ in range(20))


def test_only_addresses_of_this_host_alone_are_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "", "10.0.0.1", "example.org")))


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "a..b"])
def test_where_nothing_can_listen_there_is_no_free_port(host):
    with pytest.raises((OSError, UnicodeError)):
        free_port(host)
