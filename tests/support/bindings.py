"""In which variables of which modules a function or a class is to be found, without a search."""

import sys
from types import FunctionType, ModuleType

_sizes = {}
"""How many variables each module had when it was indexed, by the module's id."""

_places = {}
"""By the id of the function or class."""


def is_indexed(value):
    return type(value) is FunctionType or issubclass(type(value), type)


def bindings_of(value):
    """Every (module, name) whose value it is."""
    index_what_is_new()
    found = dict.fromkeys(_places.get(id(value), ()))
    return [(module, name) for module, name in found if vars(module).get(name) is value]


def index_what_is_new():
    """Look at the modules that have other variables than when they were indexed, or at all of one."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType) and _sizes.get(id(module)) != len(vars(module)):
            _sizes[id(module)] = len(vars(module))
            for name, value in list(vars(module).items()):
                if is_indexed(value):
                    _places.setdefault(id(value), []).append((module, name))


def rebind(places, value):
    for module, name in places:
        setattr(module, name, value)
        _places.setdefault(id(value), []).append((module, name))


index_what_is_new()
