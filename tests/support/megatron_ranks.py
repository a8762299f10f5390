"""Ranks of a Megatron model in processes of their own, and what tests have them do.

Starting a rank takes seconds, so one group serves all tests of a file: it makes Megatron's groups
anew for every layout.
"""

import atexit
import traceback
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from onpolicy.compat import megatron_on_cpu
from onpolicy.contract import AdapterShape, NumericsContract
from onpolicy.models.facts import ModelFacts
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.models.size import operator_shapes
from onpolicy.models.stored import stored_tensors
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.kept_tokens import packed
from onpolicy.system.rendezvous import open_store
from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.forked_ranks import CONTEXT, ranks_are_forked, require_imported
from tests.support.processes import end_with_parent

TEMPERATURE = 0.7
TIMEOUT = timedelta(seconds=100)


class Ranks:
    """Some processes that form a gloo group and run what they are sent."""

    def __init__(self, count):
        self._store, port = open_store("127.0.0.1", TIMEOUT)
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, count, port, theirs))
            with ranks_are_forked():
                process.start()
            theirs.close()  # so that a rank that dies ends our wait for it
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.stop)  # before Python waits for processes that are no daemons

    def run(self, function, *args):
        """What `function(*args)` returns on every rank; its first error is raised here."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self._pipes]
        for error in [answer for ok, answer in answers if not ok]:
            raise AssertionError(error)
        return [answer for _, answer in answers]

    def stop(self):
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank, count, port, pipe):
    end_with_parent()  # also when the tests are killed while a rank waits for another
    require_imported()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the tests were ended
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model under a layout, and one micro-batch for every data-parallel rank."""

    path: Path
    batches: list[list[list[int]]]
    layout: MegatronLayout = field(default_factory=MegatronLayout)
    dtype: str = "float32"
    blocks: int = 1
    replay: bool = False
    kept: bool = False
    """Whether tokens were drawn from a part of the vocabulary."""

    shares_prefixes: bool = False
    adapter: AdapterShape | None = None

    @property
    def contract(self):
        contract = make_contract(self.path, self.dtype, self.blocks)
        return replace(contract, adapter=self.adapter)

    def packed(self, data_rank):
        return self._pack(self.batches[data_rank])

    def _pack(self, sequences):
        config = AutoConfig.from_pretrained(self.path)
        experts = [random_experts(config, each) for each in sequences] if self.replay else ()
        kept = [random_kept(config, each) for each in sequences] if self.kept else ()
        batch = pack(sequences, experts, kept)
        return share_prefixes(batch) if self.shares_prefixes else batch

    def with_batches(self, batches):
        return replace(self, batches=batches)

    def micro_batches(self, data_rank, count):
        """The batch cut into `count` of consecutive sequences."""
        sequences = self.batches[data_rank]
        size = -(-len(sequences) // count)
        return [self._pack(sequences[i : i + size]) for i in range(0, len(sequences), size)]


def asked_for(sequence):
    """What comes after a third of a sequence, but for two tokens that were given in between."""
    first, given = max(1, len(sequence) // 3), len(sequence) // 2
    return [i >= first and i not in (given, given + 1) for i in range(len(sequence))]


def pack(sequences, experts=(), kept_tokens=()):
    asked = [asked_for(sequence) for sequence in sequences]
    temperatures = [[TEMPERATURE] * sum(mask) for mask in asked]
    return PackedTokens.pack(
        sequences, asked, temperatures, routed_experts=experts, kept_tokens=kept_tokens
    )


def random_experts(config, sequence):
    """Experts as a rollout would return them for a sequence; some of them are not known."""
    if len(sequence) % 3 == 0:
        return None
    rng = np.random.default_rng(sequence)
    size = (len(sequence) - 1, config.num_hidden_layers)
    choices = rng.random((*size, config.num_experts)).argsort(-1)
    choices[rng.random(size) < 0.3] = -1
    chosen = choices[..., : config.num_experts_per_tok]
    return chosen.reshape(len(chosen), -1).astype(np.int32)


def random_kept(config, sequence):
    """What each token that is asked for was drawn from, as a rollout says it; of some sequences all."""
    if len(sequence) % 4 == 0:
        return []
    asked = torch.tensor([t for t, mask in zip(sequence, asked_for(sequence), strict=True) if mask])
    kept = torch.from_numpy(np.random.default_rng(sequence).random((len(asked), config.vocab_size)))
    return packed(kept.scatter(1, asked[:, None], 0.0) < 0.5)


def make_contract(path, dtype="float32", blocks=1):
    config = AutoConfig.from_pretrained(path)
    shapes = operator_shapes(ModelFacts(config), row_parallel_blocks=blocks)
    return NumericsContract(
        backend="cpu", device="cpu", dtype=dtype, shapes=shapes, row_parallel_blocks=blocks
    )


def random_sequences(*lens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 137, (n,), generator=generator).tolist() for n in lens]


def loss_of(log_probs, entropy=None, *_):
    """Some loss in which every token has another share, of either."""
    numbers = torch.arange(1, len(log_probs) + 1)
    loss = (log_probs * numbers.cos()).sum()
    return loss if entropy is None else loss + (entropy * numbers.sin()).sum()


def reference(job, micro_batches=1):
    """What the Hugging Face model on one rank makes of all batches: (results, gradients)."""
    config = AutoConfig.from_pretrained(job.path)
    policy = empty_policy(config, CpuOperators(1), row_parallel_blocks=job.blocks)
    stored = AutoModelForCausalLM.from_pretrained(job.path, dtype=getattr(torch, job.dtype))
    policy.causal_lm.load_state_dict(stored.state_dict(), assign=True)
    policy.causal_lm.tie_weights()
    policy.requires_grad_(True)
    results = []
    for data_rank in range(len(job.batches)):
        scores = [policy(batch) for batch in job.micro_batches(data_rank, micro_batches)]
        for each in scores:
            loss_of(*each).backward()
        log_probs, entropy = (torch.cat(column) for column in list(zip(*scores, strict=True))[:2])
        results.append((log_probs.detach(), entropy.detach()))
    gradients = {}
    for name, parameter in policy.causal_lm.named_parameters():
        gradients |= stored_tensors(policy.causal_lm, name, parameter.grad)
    return results, gradients


# From here on, what ranks run.


def make_model(job):
    from onpolicy.training import distributed
    from onpolicy.training.megatron.make import initialize

    end_groups()
    distributed.init_process_group()
    config = AutoConfig.from_pretrained(job.path)
    job.layout.check(config, job.contract, distributed.world_size())
    if job.layout.needs_cuda_names:
        megatron_on_cpu.activate()
    initialize(job.layout)
    from onpolicy.training.megatron.gpt_model import build_model
    from onpolicy.training.megatron.megatron_weights import load_hf_weights

    model = build_model(config, job.contract, CpuOperators(1), job.layout)
    load_hf_weights(model, job.path)
    return model


def end_groups():
    """End the last layout's groups, which Megatron forgets; each has threads of its own."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    everyone = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not everyone and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def data_rank():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank()


def score(job):
    """(data rank, log_probs, entropy) without gradients."""
    from onpolicy.training.megatron.gpt_model import packed_forward

    model = make_model(job)
    with torch.no_grad():
        log_probs, entropy, *_ = packed_forward(model, job.packed(data_rank()))
    return data_rank(), log_probs, entropy


def score_broken(job, name):
    """As `score`, with one of our modules broken (megatron_controls.py)."""
    from tests.support.megatron_controls import broken

    with broken(name):
        return score(job)


def differentiate(job):
    """(data rank, log_probs, entropy, gradients by Hugging Face names on rank 0)."""
    from onpolicy.training.megatron.gpt_model import packed_forward

    model = make_model(job)
    log_probs, entropy, *_ = packed_forward(model, job.packed(data_rank()))
    loss_of(log_probs, entropy).backward()
    sum_gradients(model)
    return data_rank(), log_probs.detach(), entropy.detach(), export_gradients(model)


def train(job, micro_batches=1):
    """As `differentiate`, through Megatron's schedule and its DistributedDataParallel."""
    from onpolicy.training.megatron.schedule import score

    model, wrapped = make_wrapped(job)
    batches = job.micro_batches(data_rank(), micro_batches)
    scores = score(model, batches)
    accumulate(wrapped, batches)
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad.to(parameter.dtype)
    log_probs, entropy = (torch.cat(column) for column in list(zip(*scores, strict=True))[:2])
    return data_rank(), log_probs, entropy, export_gradients(model)


def make_wrapped(job, **settings):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    megatron_on_cpu.activate()
    model = make_model(job)
    model.config.finalize_model_grads_func = finalize_model_grads
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    return model, DistributedDataParallel(model.config, config, model)


def accumulate(wrapped, batches):
    from onpolicy.training.megatron.schedule import accumulate_gradients

    wrapped.zero_grad_buffer()
    accumulate_gradients(wrapped, batches, lambda number, scores: loss_of(*scores))


def step_and_reload(job, directory, distributed_optimizer):
    """A step of Megatron's optimizer, and its checkpoint read back.

    Returns (gradient norm, weights before the step, after it, and as read back), on rank 0.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from onpolicy.training.megatron.megatron_model import read_tensors, write_tensors

    model, wrapped = make_wrapped(job, use_distributed_optimizer=distributed_optimizer)
    before = export_weights(model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=job.dtype == "bfloat16",
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=distributed_optimizer,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    accumulate(wrapped, job.micro_batches(data_rank(), 1))
    _, norm, _ = optimizer.step()
    after = export_weights(model)
    write_tensors(directory, wrapped, optimizer)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    read_tensors(directory, wrapped, optimizer)
    return norm, before, after, export_weights(model)


def layer_forwards(job):
    """How many MLPs run forward in a forward and backward pass of one micro-batch."""
    from unittest.mock import patch

    from onpolicy.training.megatron.modules import AlignedMLP

    calls = []
    forward = AlignedMLP.forward

    def counted(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    with patch.object(AlignedMLP, "forward", counted):
        differentiate(job)
    return len(calls)


def score_in_stages(job):
    from onpolicy.training.megatron.schedule import score

    return [x for both in score(make_model(job), [job.packed(0)]) for x in both]


def stand_in_at_start(job):
    """What a layout without need for the stand-in left of it, one with need said, and its messages.

    Last, whether what everyone but Megatron imports is as before.
    """
    import logging

    from onpolicy.errors import ContractError
    from onpolicy.training.megatron.make import initialize

    before = dict(vars(torch)), dict(vars(torch.cuda))
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    megatron_on_cpu.logger.addHandler(handler)
    make_model(replace(job, layout=MegatronLayout()))
    active = megatron_on_cpu.is_active()
    pipeline = MegatronLayout(pipeline_model_parallel_size=2)
    try:
        initialize(pipeline)
        refused = ""
    except ContractError as error:
        refused = str(error)
    for _ in range(2):
        make_model(replace(job, layout=pipeline))
    unchanged = all(
        vars(module).get(name) is value
        for module, names in zip((torch, torch.cuda), before, strict=True)
        for name, value in names.items()
    )
    return active, refused, messages, unchanged


def dispatch_rows(experts):
    """Rows to the experts of two ranks and back: (results, gradient of the rows, of the weights).

    experts: one list of choices for each token, by rank. Four experts, whose weights are fixed.
    """
    import torch.nn.functional as F

    from onpolicy.ops.mixture_of_experts import expert_outputs, gated_halves
    from onpolicy.ops.row_parallel import RowParallel
    from onpolicy.training.megatron.moe import all_to_all

    rank = dist.get_rank()
    rows, gate_up, down = expert_weights(experts)
    mine = slice(2 * rank, 2 * rank + 2)
    weights = [gate_up[mine].requires_grad_(), down[mine].requires_grad_()]
    operators = CpuOperators(1)
    gate = gated_halves(operators, F.silu)

    def compute(rows, chosen):
        return expert_outputs(operators, rows, chosen, *weights, gate, RowParallel())[0]

    x = rows[rank].requires_grad_()
    chosen = torch.tensor(experts[rank])
    results = all_to_all(x, chosen, 2, compute, dist.group.WORLD)
    loss_of(results.sum(1)).backward()
    return results.detach(), x.grad, [weight.grad for weight in weights]


def expert_weights(experts):
    """(rows of every rank, gate_up [4, 2 I, H], down [4, H, I])"""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(len(own), 24, generator=generator) for own in experts]
    gate_up = torch.randn(4, 32, 24, generator=generator)
    return rows, gate_up, torch.randn(4, 24, 16, generator=generator)


def sum_gradients(model):
    """As Megatron's finalize_model_grads, for a model that is not wrapped."""
    from megatron.core import parallel_state

    config = model.config
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in model.named_parameters():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if not getattr(parameter, "allreduce", True):
            group = parallel_state.get_expert_data_parallel_group()
        dist.all_reduce(parameter.grad, group=group)
        shared = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        if shared or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)):
            dist.all_reduce(parameter.grad, group=tensor_group)


def export_gradients(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    stored = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    return {n: x for n, x in export_weights(model).items() if n.rpartition(".")[2] not in stored}


def export_weights(model):
    from onpolicy.training.megatron.megatron_weights import export_buckets

    return {name: tensor for bucket in export_buckets(model, 1 << 20) for name, tensor in bucket}


def export(job, max_bytes, part="all", frozen=(), ranks=(0,)):
    """Names of the tensors in every bucket and all tensors, on every rank; of a model that does not
    train parameters whose names end so."""
    from onpolicy.training.megatron.megatron_weights import export_buckets

    model = make_model(job)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    buckets = list(export_buckets(model, max_bytes, part, ranks))
    names = [[name for name, _ in bucket] for bucket in buckets]
    return names, {name: tensor for bucket in buckets for name, tensor in bucket}


def count_parameters(job):
    return sum(parameter.numel() for parameter in make_model(job).parameters())


def with_blocks(job, layout):
    """The job under another layout, with as many blocks as that has tensor-parallel ranks."""
    return replace(job, layout=layout, blocks=layout.tensor_model_parallel_size)
