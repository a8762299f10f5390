"""Breakdown of an optimizer step's time: its operators, forward and backward, and the rest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops import Operators
from onpolicy.training.policy_trainer import PolicyTrainer

OPERATORS = {
    "linear": (
        "linear",
        "partial_linear",
        "linear_gradients",
        "blockwise_linear",
        "row_parallel_linear",
        "add_scaled",
    ),
    "attention": ("attention", "paged_attention"),
    "recurrence": ("causal_conv", "gated_delta"),
    "norm": ("rms_norm", "layer_norm"),
    "rotary": ("rotary",),
    "activation": ("elementwise", "gated"),
    "experts": ("grouped_linear", "grouped_partial_linear", "mix_few", "softmax", "topk"),
    "log_probs": ("log_softmax", "gather_log_probs", "grad_logits", "sample", "uniform"),
}
"""The operators of each kind."""

HEAD, MODEL, LOSS, NORM, OPTIMIZER, REST = (
    "head",
    "rest of the model",
    "loss",
    "gradient norm",
    "optimizer",
    "rest",
)
ROWS = (*OPERATORS, HEAD, MODEL, LOSS, NORM, OPTIMIZER, REST)
"""The rows of a step. `head` is the output projection, `log_probs` the computation on its logits;
the rest of the model is embedding, residuals, copies, and gathering of weights."""

FORWARD, BACKWARD = "forward", "backward"


class Stopwatch:
    """A stopwatch of nested sections; each excludes the sections inside it, so that they add up."""

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        """Seconds of each row, FORWARD or BACKWARD."""

        self._open: list[tuple[str, str]] = []
        self._since = 0.0

    @contextmanager
    def section(self, row: str, phase: str | None = None) -> Iterator[None]:
        """Count time towards `row`; in the enclosing section's phase, if none is given."""
        self._lap()
        self._open.append((row, phase or (self._open[-1][1] if self._open else FORWARD)))
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def timed(
        self, row: str, function: Callable[..., Any], phase: str | None = None
    ) -> Callable[..., Any]:
        """Return the function with its calls timed as sections."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.section(row, phase):
                return function(*args, **kwargs)

        return called

    def _lap(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def watching(trainer: PolicyTrainer, vocab_size: int) -> Iterator[Stopwatch]:
    """Time the work of `trainer`, an engine of this process, within the context.

    Values stay the same. Gradients may differ in the order in which contributions to one tensor are
    added, since contributions within an operator are added first.
    """
    policy, watch = trainer.policy, Stopwatch()
    methods = (
        (policy, "accumulate_gradients", LOSS),
        (policy, "clip_gradients", NORM),
        (policy, "take_step", OPTIMIZER),
        (trainer, "train", REST),
    )
    with ExitStack() as stack:
        for owner, name, row in methods:
            stack.callback(delattr, owner, name)
            setattr(owner, name, watch.timed(row, getattr(owner, name)))
        forward = policy.module.forward
        stack.callback(setattr, policy.module, "forward", forward)
        policy.module.forward = watch.timed(MODEL, forward)
        backward = torch.autograd.backward  # what `Tensor.backward` and Megatron's schedules call
        stack.callback(setattr, torch.autograd, "backward", backward)
        torch.autograd.backward = watch.timed(MODEL, backward, BACKWARD)
        stack.callback(policy.use, trainer.operators)
        policy.use(watched_operators(trainer.operators, watch, vocab_size))
        yield watch


def watched_operators(operators: Operators, watch: Stopwatch, vocab_size: int) -> Operators:
    """Return operators whose calls and backward passes are sections."""
    return cast(Operators, _Timed(operators, watch, vocab_size))


class _Timed:
    """Operators whose calls and backward passes are sections, including nested calls."""

    def __init__(self, operators: Operators, watch: Stopwatch, vocab_size: int):
        self._operators, self._watch, self._vocab_size = operators, watch, vocab_size
        for kind, names in OPERATORS.items():
            for name in names:
                setattr(self, name, self._section(kind, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def _section(self, kind: str, name: str) -> Callable[..., Any]:
        operator = getattr(self._operators, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            row = HEAD if self._is_head(name, args) else kind
            call = _Call(self._watch, row, operator, args, kwargs)
            result = _Section.apply(call, *call.tensors) if call.needs_grad else call.run()
            return result

        return called

    def _is_head(self, name: str, args: tuple[Any, ...]) -> bool:
        is_projection = name == "linear" and len(args[1]) == self._vocab_size
        return is_projection or name == "linear_gradients"


class _Call:
    """One call of an operator, whose tensors may be replaced."""

    def __init__(
        self,
        watch: Stopwatch,
        row: str,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.watch, self.row = watch, row
        self._operator, self._names = operator, tuple(kwargs)
        self._arguments = [*args, *kwargs.values()]
        self._places = [i for i, x in enumerate(self._arguments) if isinstance(x, Tensor)]
        self.tensors = [self._arguments[i] for i in self._places]
        self.needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    def run(self) -> Any:
        """Call the operator on the current tensors, as a section."""
        for place, tensor in zip(self._places, self.tensors, strict=True):
            self._arguments[place] = tensor
        count = len(self._arguments) - len(self._names)
        kwargs = dict(zip(self._names, self._arguments[count:], strict=True))
        with self.watch.section(self.row):
            return self._operator(*self._arguments[:count], **kwargs)


class _Section(torch.autograd.Function):
    """A call with a graph of its own, so that its backward pass is a section too."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: _Call, *tensors: Tensor) -> Any:
        inner = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        call.tensors = inner
        with torch.enable_grad():
            result = call.run()
        made = result if isinstance(result, tuple) else (result,)
        ctx.call, ctx.inner, ctx.made = call, inner, made  # type: ignore[attr-defined]
        out = tuple(x.detach() for x in made)
        fixed = [x for x, own in zip(out, made, strict=True) if not own.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return out if isinstance(result, tuple) else out[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, inner, made = ctx.call, ctx.inner, ctx.made  # type: ignore[attr-defined]
        wanted = [t for t in inner if t.requires_grad]
        pairs = [(x, g) for x, g in zip(made, grads, strict=True) if x.requires_grad]
        outs, gradients = zip(*pairs, strict=True)
        with call.watch.section(call.row):
            found = iter(torch.autograd.grad(outs, wanted, gradients, allow_unused=True))
        return (None, *(next(found) if t.requires_grad else None for t in inner))
