"""Triton's interpreter on a CPU, corrected so that it models how a GPU orders sums.

Import this module before anything imports Triton (tests/conftest.py does): Triton decides when a
kernel, or a function of its own library, is decorated whether the interpreter is to run it. The
variable that says so is set for these imports only, so servers started by tests do not see it.

Two things the interpreter does unlike any GPU are put right:

- `tl.dot` calls BLAS, whose results depend on the shape, and reads bfloat16 as integers. Here it
  is one chain of float32 multiplications and additions over K, in ascending order.
- float32 is cut off to bfloat16. Here it is rounded to nearest, ties to even, and subnormal numbers
  are kept in both directions.

What is left is a model of indices, masks and the order of blocks, not of a GPU's bits.
"""

import os

import numpy as np

os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton.experimental.gluon  # noqa: F401 (the interpreter would import it later)
    import triton.language as tl
    from triton.runtime import interpreter

    import onpolicy.ops.hopper.key_chunks
    import onpolicy.ops.triton
    import onpolicy.weights.xxh3_kernels  # noqa: F401
finally:
    del os.environ["TRITON_INTERPRET"]


def _sequential_dot(_, a, b, total, *__):
    left, right = _widen(a), _widen(b)
    out = total.data.copy()
    for k in range(left.shape[-1]):
        out += left[..., k, None] * right[..., k, None, :]
    return interpreter.TensorHandle(out, total.dtype.scalar)


def _widen(handle):
    """float32 numbers; bfloat16 is kept as integers."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _narrow(numbers):
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


_cast = interpreter.InterpreterBuilder.cast_impl


def _exact_cast(self, source, dtype):
    kinds = source.dtype.scalar, dtype.scalar
    if kinds == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(_narrow(source.data), tl.bfloat16)
    if kinds == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_widen(source), tl.float32)
    return _cast(self, source, dtype)


interpreter.InterpreterBuilder.create_dot = _sequential_dot
interpreter.InterpreterBuilder.cast_impl = _exact_cast
