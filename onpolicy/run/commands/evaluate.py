"""The command `onpolicy eval`: the evaluation of a checkpoint on servers, without a trainer."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onpolicy.cluster.placement import placement_of_servers
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig, HostsConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.contract import NumericsContract
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.outputs.directory import versions
from onpolicy.run.engines import EnginePair
from onpolicy.run.journal import evaluate as evaluate_set
from onpolicy.run.launch.cluster_engines import places_on_cluster
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.run.launch.inputs import Inputs
from onpolicy.run.run import Run
from onpolicy.training.weight_outlet import bucket_bytes
from onpolicy.weights.digest import WeightBucket, in_buckets
from onpolicy.weights.push import push_weights
from onpolicy.weights.rounding import format_of_push, rounded
from onpolicy.weights.transports import make_transport

logger = logging.getLogger(__name__)

Report = dict[str, Any]


def evaluate(config: TrainConfig, inputs: Inputs, rollouts_done: int) -> Report:
    """Sample and score every evaluation set as after `rollouts_done` rollouts; return the report."""
    contract, engines = inputs.contract, config.engine
    tp_size, host = tensor_parallel_size(config.sglang_args), engines.rollout_host
    place = partial(placement_of_servers, engines, tp_size, host, contract)
    metrics: dict[str, float] = {}
    with places_on_cluster(HostsConfig(), place, engines.cpu_threads) as places:
        make_rollout = partial(make_rollout_group, places=places)
        make_engines = partial(PublishedEngines, make_rollout=make_rollout)
        with Run(config, inputs, make_engines=make_engines) as run:
            logger.info("pushing the checkpoint's weights to the servers")
            run.engines.push_weights(0)
            for name in inputs.eval_sets:
                metrics |= evaluate_set(run.sampler, run.journal, name, rollouts_done)
            weights = run.engines.weight_digest
    return {
        "rollouts_done": rollouts_done,
        "metrics": metrics,
        "run_dir": config.output.run_dir,
        "contract": contract.fingerprint,
        "weights": weights,
        "versions": versions(),
    }


class PublishedEngines(EnginePair):
    """Servers without a trainer, which get a checkpoint's weights in the same push as from a trainer."""

    def start(self) -> None:
        self._launch()
        self.rollout.connect({})

    def use(self, contract: NumericsContract, fallback: FallbackConfig, centers: bool) -> None:
        """Do nothing: without rollouts the contract never changes."""

    def push_weights(self, version: int) -> None:
        self.weight_version = version
        self.push_again()

    def push_again(self) -> None:
        sync, directory = self.config.sync.weight_sync, Path(self.config.output.run_dir)
        for attempt in self._until_none_dies("pushing the checkpoint's weights"):
            with attempt, self._memory_for_weights(), ExitStack() as on_exit:
                transport = make_transport(sync, directory)
                on_exit.callback(transport.end)
                given = self._buckets(), self.rollout.clients, transport, self.weight_version
                self.weight_digest = push_weights(*given)

    def _buckets(self) -> Iterator[WeightBucket]:
        config, asked = self.config, self.config.engine.rollout_weight_format
        parts = in_buckets(self._tensors(), bucket_bytes(config))
        return rounded(parts, format_of_push(self.contract, asked))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors as a trainer sends them: parameters are cast, buffers not."""
        model = self.config.model
        dtype = getattr(torch, self.contract.dtype)
        empty = empty_causal_lm(self.hf_config, model.trust_remote_code)
        buffers = {name for name, _ in empty.named_buffers()}
        reader = CheckpointReader(model.hf_checkpoint)
        for name, tensor in reader.tensors():
            yield name, tensor if name in buffers else tensor.to(dtype)
        for name in reader.tower if model.images else ():
            yield name, reader.read(name, ()).to(dtype)
