"""The process of a run's engine, started while the run is checked."""

from contextlib import AbstractContextManager, nullcontext

from onpolicy.cluster.placement import placement_here
from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.rollout.early_server import begun
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.server import environment_of
from onpolicy.system.free_memory import num_gpus


def engine_begun(config: TrainConfig) -> AbstractContextManager[None]:
    """Start the process of a run's only engine on this host's cores, so that it imports SGLang
    meanwhile. Do nothing for any other run."""
    engine = config.engine
    if engine.rollout_server_url or config.cluster.ray_address or engine.num_started != 1:
        return nullcontext()
    if num_gpus():  # forking a process with a driver's context is unsafe; untested there
        return nullcontext()
    try:
        return begun(environment_of(_likely(config)))
    except ConfigError:  # the run's own checks say it better
        return nullcontext()


def _likely(config: TrainConfig) -> EngineSpec:
    """Return a spec from flags alone, enough for the environment of the engine's process."""
    aligned = "cpu" if config.plan.aligned_by else "stock"
    contract = NumericsContract(
        backend="portable" if config.operators.is_portable else aligned,
        device="cpu",
        dtype=config.model.dtype,
        shapes=OperatorShapes(linear=(), attention=(), norm=(), vocab_size=1),
    )
    (slot,) = placement_here(config, contract).engines
    return EngineSpec(
        hf_checkpoint=config.model.hf_checkpoint,
        contract=contract,
        host=config.engine.rollout_host,
        api_key="",
        seed=config.seed,
        num_threads=config.engine.cpu_threads or slot.cpu_threads,
        trust_remote_code=config.model.trust_remote_code,
        sglang_args=config.sglang_args,
    )
