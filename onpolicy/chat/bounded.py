"""Bound on the work of chat templates, which third parties write with loops nested at will.

A sandbox protects the host from a template, but not its processor: its longest `range` has 100,000
numbers, and three of them nested never end. So every turn of a loop and every call counts as a
step, and so does every thousand characters made; a rendering has a fixed number of steps for each
message and each tool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS_EACH = 100_000
"""Steps for each message, each tool, and the frame around them."""

CHARACTERS_A_STEP = 1000
LARGEST_NUMBER = 4096
"""The most bits of a number that a template may compute."""

_TURNS, _TURN, _MADE = "_turns_of_a_loop", "_turn_of_a_loop", "_text_that_is_made"


class TemplateWorkError(ValueError):
    """A chat template does not end within its bound."""


class Allowance:
    """The steps that a rendering has left."""

    def __init__(self, items: int = 1):
        self._items, self.left = items, STEPS_EACH * items

    def spend(self, steps: int = 1) -> None:
        """Use up steps; raise TemplateWorkError where there are none left."""
        self.left -= steps
        if self.left < 0:
            raise TemplateWorkError(
                f"chat_template: takes more than {STEPS_EACH * self._items:,} steps (turns of loops, "
                f"calls, thousands of characters), and it may take {STEPS_EACH:,} for each message and "
                "tool. Mend the loops of the checkpoint's chat_template.jinja, or take another's"
            )


_allowance = ContextVar[Allowance | None]("_allowance", default=None)


def _spend(steps: int = 1) -> None:
    # No rendering has begun while a template is compiled, where constants are folded.
    (_allowance.get() or Allowance()).spend(steps)


class BoundedTemplate(Template):
    """A template that is rendered with an allowance of its own."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        items = sum(len(kwargs.get(name) or ()) for name in ("messages", "tools"))
        token = _allowance.set(Allowance(1 + items))
        try:
            return super().render(*args, **kwargs)
        finally:
            _allowance.reset(token)


class _Counted(NodeTransformer):
    """A transformer that makes loops and joined texts count their steps."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        line = node.lineno
        node.iter = nodes.Filter(node.iter, _TURNS, [], [], None, None, lineno=line)
        if node.recursive:  # `loop(...)` iterates without a For node
            turn = nodes.Filter(nodes.Const(""), _TURN, [], [], None, None, lineno=line)
            node.body.insert(0, nodes.ExprStmt(turn, lineno=line))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(node, _MADE, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A copy of an environment whose templates have a bound."""

    intercepted_binops = frozenset({"+", "*", "**"})
    template_class = BoundedTemplate

    def __init__(self, like: ImmutableSandboxedEnvironment):
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(each) for each in like.extensions.values()],
        )
        self.globals.update(like.globals)
        self.filters.update({name: _bounded(each) for name, each in like.filters.items()})
        self.filters |= {_TURNS: _turns, _TURN: _turn, _MADE: _made}

    def _parse(self, *args: Any) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(*args))
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call as the sandbox does, and count a step: every call of a template comes through here."""
        _spend(1 + _size_of_numbers((*args, *kwargs.values())))
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator_: str, left: Any, right: Any) -> Any:
        """Return `left + right`, `left * right` or `left ** right`, unless that is too large."""
        if operator_ == "+":
            return _counted(left + right)
        if isinstance(left, int) and isinstance(right, int):
            size = (abs(left).bit_length(), abs(right).bit_length())
            bits = sum(size) if operator_ == "*" else size[0] * right
            if bits > LARGEST_NUMBER:
                raise TemplateWorkError(
                    f"chat_template: computes a number of {bits:,} bits, and it may have "
                    f"{LARGEST_NUMBER:,}. Mend the checkpoint's chat_template.jinja, or take another's"
                )
        else:
            _spend(max(_repeated(left, right), _repeated(right, left)))
        return left * right if operator_ == "*" else left**right


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts as a step, with what it makes."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _spend(1 + _size_of_numbers((*args, *kwargs.values())))
        return _counted(function(*args, **kwargs))

    return counted


def _size_of_numbers(values: Iterable[Any]) -> int:
    """Return the steps for numbers that may be widths, to which a text is padded."""
    numbers = (abs(value) for value in values if isinstance(value, int))
    return sum(numbers) // CHARACTERS_A_STEP


def _repeated(value: Any, times: Any) -> int:
    """Return steps for `value * times`."""
    is_repeated = isinstance(value, (str, list, tuple)) and isinstance(times, int)
    return len(value) * times // CHARACTERS_A_STEP if is_repeated else 0


def _counted(made: Any) -> Any:
    if isinstance(made, (str, list, tuple)):
        _spend(len(made) // CHARACTERS_A_STEP)
    return made


@pass_context  # so that it is not computed while the template is compiled
def _turns(_: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend()
        yield item


@pass_context
def _turn(_: Any, value: Any) -> Any:
    _spend()
    return value


@pass_context
def _made(_: Any, text: Any) -> Any:
    return _counted(text)


def bound_templates() -> None:
    """Have transformers compile chat templates with a bound, in this process."""
    from transformers.utils import chat_template_utils as transformers_templates

    compile_ = transformers_templates._cached_compile_jinja_template
    if not hasattr(compile_, "unbounded"):
        # Compiling folds constants, so the source is only ever compiled with a bound.
        bounded = functools.lru_cache(
            lambda source: BoundedEnvironment(compile_("").environment).from_string(source)
        )
        bounded.unbounded = compile_  # type: ignore[attr-defined]
        transformers_templates._cached_compile_jinja_template = bounded
