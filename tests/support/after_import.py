"""Code for processes that a test does not start itself: run once such a process knows a module."""

SITECUSTOMIZE = """
import importlib.abc, importlib.util, sys
MODULE, CODE = {module!r}, {code!r}
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_more(module):
            execute(module)
            exec(CODE, {{}})
        spec.loader.exec_module = execute_and_more
        return spec
if {condition}:
    if MODULE in sys.modules:  # the process is forked
        exec(CODE, {{}})
    else:
        sys.meta_path.insert(0, Finder())
"""


def after_import(module, code, condition="True"):
    """A module `sitecustomize`, which Python runs first: it runs `code` once `module` is there."""
    return SITECUSTOMIZE.format(module=module, code=code, condition=condition)
