"""Real trainers, and engines in memory that sample from their models and begin with stock contracts."""

from contextlib import contextmanager

from onpolicy.models.hf_config import load_config
from onpolicy.run.engines import trainer_here
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import distributed
from tests.support.policies_in_memory import PolicyHost
from tests.support.tiny import make_checkpoint
from tests.support.tiny_combinations import make_base
from tests.support.trainer_in_memory import pair_maker
from tests.support.unstarted_run import changed


@contextmanager
def stock_pairs(directory):
    """Starts pairs, of an architecture and with changes of `make_base`, and stops them in the end."""
    pairs = []

    def started(architecture="qwen3", **values):
        distributed.init_process_group()
        path = str(make_checkpoint(directory / architecture, architecture))
        config = changed(make_base(directory), hf_checkpoint=path, **values)
        hf_config = load_config(path)
        contract = contract_for(config, hf_config, aligned=False)
        pair = pair_maker(PolicyHost(hf_config), trainer_here)(
            config, hf_config, contract, directory
        )
        pairs.append(pair)
        pair.start()
        return pair

    yield started
    for pair in pairs:
        pair.stop()
