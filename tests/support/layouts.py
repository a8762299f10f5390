"""The same numbers in other places: tensors as callers cut them out of larger ones."""


def whole(x):
    return x.clone()


def offset(x):
    """Off the boundaries that vectors are loaded from."""
    return x.new_empty(x.numel() + 3)[3:].view(x.shape).copy_(x)


def strided(x):
    """Every second number."""
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)


def wider(x):
    """Rows of a wider matrix."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 5)[..., 3:-2].copy_(x)


def transposed(x):
    """Column after column."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(x):
    """The first row, or number, for all: other numbers than x."""
    return x[:1].expand(x.shape)


LAYOUTS = (whole, offset, strided, wider, transposed, expanded)
