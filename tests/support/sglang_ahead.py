"""SGLang, imported before it is needed and hidden: two seconds of processor time less for each run.

After `hide` a process has what an engine imports, and nothing of it shows: the modules are put away, and
what they changed in others, as in transformers' classes, is undone. What is forked from it is as
without SGLang, until `bring_back` makes one the process that engines are forked from.
"""

import importlib
import os
import sys
from types import ModuleType

OURS = ("sglang", "sglang_patches")
ENGINE = ("sglang.launch_server", "sglang.srt.models.registry", "tests.support.quick_server")
ABSENT = object()

_hidden = {}
"""Modules, by their names."""

_undone = []
"""(module or class, name, what SGLang's import has left there)."""

_variables = {}
"""That its import has set."""


def is_of_sglang(name):
    return name.split(".")[0] in OURS or name == "tests.support.quick_server"


def variables_of(module):
    """(owner, name, value) of a module's variables, and of those of its own classes."""
    for name, value in list(vars(module).items()):
        yield module, name, value
        if issubclass(type(value), type) and vars(value).get("__module__") == module.__name__:
            for attribute, held in list(vars(value).items()):
                yield value, attribute, held


def _state():
    """{(id of the owner, name): (owner, name, value, what it contains if it is a list)}"""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType) and not is_of_sglang(name)
    ]
    return {
        (id(owner), name): (owner, name, value, [*value] if type(value) is list else None)
        for module in modules
        for owner, name, value in variables_of(module)
    }


def _held(entry):
    """What a variable is, or contains, to compare it with what it was."""
    return id(entry[2]), [*map(id, entry[3] or ())]


def _put(owner, name, value, content):
    if value is ABSENT:
        delattr(owner, name)
    elif vars(owner).get(name, ABSENT) is not value:
        setattr(owner, name, value)
    if content is not None:
        value[:] = content


def hide():
    """Import what an engine does under this process's variables, and hide it."""
    variables, before = dict(os.environ), _state()
    owners, known = {id(entry[0]) for entry in before.values()}, set(sys.modules)
    for module in ENGINE:
        importlib.import_module(module)
    _variables.update({k: v for k, v in os.environ.items() if variables.get(k) != v})
    os.environ.clear()
    os.environ.update(variables)
    after = _state()
    for key, entry in after.items():
        old = before.get(key)
        if key[0] not in owners or issubclass(type(entry[2]), ModuleType):
            continue  # of a module that is new, or a new module's name in its package
        if old is None or _held(old) != _held(entry):
            _undone.append(entry)
            _put(*(old or (*entry[:2], ABSENT, None)))
    for key in before.keys() - after.keys():
        owner, name, value, content = before[key]
        _undone.append((owner, name, ABSENT, None))
        _put(owner, name, value, content)
    for name in sys.modules.keys() - known:
        if is_of_sglang(name):
            _hidden[name] = sys.modules.pop(name)


def is_hidden():
    return bool(_hidden)


def bring_back():
    """Make this the process that has imported SGLang."""
    sys.modules.update(_hidden)
    for entry in _undone:
        _put(*entry)
    os.environ.update(_variables)
    _hidden.clear()
    _undone.clear()
