"""What --weight-sync auto is, by where the trainer computes and whose the servers are."""

import pytest

from onpolicy.config import TrainConfig, groups
from onpolicy.weights.transports import make_transport, shares_gpus
from onpolicy.weights.transports.by_host import ByHostTransport
from onpolicy.weights.transports.cuda_ipc import CudaIpcTransport
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport

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
