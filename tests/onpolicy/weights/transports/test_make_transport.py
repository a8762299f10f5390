"""What --weight-sync auto is, by where the trainer computes, whose the servers are and where each is."""

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.weights.push import Transport
from onpolicy.weights.transports import make_transport, shares_gpus
from onpolicy.weights.transports.broadcast import ByHostTransport
from onpolicy.weights.transports.shared_memory import CudaIpcTransport, SharedMemoryTransport

OURS, THEIRS = (), ("http://127.0.0.1:30000",)


@pytest.mark.parametrize(
    ("device", "servers", "near"),
    [
        ("cpu", OURS, SharedMemoryTransport),
        ("cpu", THEIRS, SharedMemoryTransport),
        ("cuda", OURS, CudaIpcTransport),
        ("cuda", THEIRS, SharedMemoryTransport),  # they may not see the trainer's GPU
    ],
)
def test_auto_is_cuda_ipc_to_near_servers_of_a_run_on_gpus_and_shared_memory_else(
    tmp_path, device, servers, near
):
    config = TrainConfig(engine=groups.EngineConfig(rollout_server_url=servers))
    assert config.sync.weight_sync == "auto"
    transport = make_transport("auto", tmp_path, on_gpus=shares_gpus(config, device))
    assert type(transport) is ByHostTransport and type(transport._near) is near


def test_a_way_that_was_asked_for_is_taken_on_gpus_too(tmp_path):
    asked = make_transport("tensor", tmp_path, on_gpus=True)
    assert isinstance(asked, ByHostTransport) and type(asked._near) is SharedMemoryTransport
    assert type(make_transport("ipc", tmp_path)) is CudaIpcTransport


BUCKET = [("w", torch.zeros(1))]


class Engine:
    def __init__(self, url):
        self.url = url


class Recorded(Transport):
    def __init__(self):
        self.calls = []

    def open(self, engines):
        self.calls.append(("open", engines))

    def send(self, bucket, engines, version):
        self.calls.append(("send", engines))

    def close(self, engines, version):
        self.calls.append(("close", engines))

    def abandon(self):
        self.calls.append(("abandon", []))

    def end(self):
        self.calls.append(("end", []))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://192.0.2.77:1", False),  # RFC 5737: nobody's
        ("http://no.such.host.invalid:1", False),
    ],
)
def test_an_engine_is_near_if_its_address_is_one_of_this_host(url, expected):
    assert Recorded().is_near(Engine(url)) is expected


@pytest.mark.parametrize("places", ["nn", "nf", "ff", "fnf"])
def test_each_engine_is_sent_everything_by_one_way(places):
    engines = [Engine(place) for place in places]
    near, far = Recorded(), Recorded()
    transport = ByHostTransport(near)
    transport.is_near, transport._far = lambda engine: engine.url == "n", far
    transport.open(engines)
    transport.send(BUCKET, engines, "1")
    transport.close(engines, "1")
    for way, place in ((near, "n"), (far, "f")):
        theirs = [engine for engine in engines if engine.url == place]
        verbs = ("open", "send", "close") if theirs else ()
        assert way.calls == [(verb, theirs) for verb in verbs]
    transport.abandon()
    assert near.calls[-1] == far.calls[-1] == ("abandon", [])
    transport.end()
    assert near.calls[-1] == far.calls[-1] == ("end", [])
