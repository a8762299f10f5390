"""The kernels that a call would launch on a GPU: Triton's, counted in its interpreter, and PyTorch's."""

from collections import Counter
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

NO_KERNEL = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
    "aten::new_empty_strided", "aten::promote_types", "aten::detach", "aten::_unsafe_view",
}  # fmt: skip
"""Functions that compute nothing, beside views."""


def count_kernels(call):
    """How often each would be launched by `call`, whose tensors are on the CPU."""
    counted = Counter()
    own_launch = interpreter.GridExecutor.__call__

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.name()
            if not function.is_view and name not in NO_KERNEL:
                counted[name] += 1
            return function(*args, **(kwargs or {}))

    def launch(executor, *args, **kwargs):
        counted[executor.fn.__name__] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return own_launch(executor, *args, **kwargs)

    with patch.object(interpreter.GridExecutor, "__call__", launch), Count():
        call()
    return counted
