"""Puts wrong rules in on purpose, to see that tests find them."""

import importlib
import inspect
import types
from typing import NamedTuple


class Wrong(NamedTuple):
    """``old`` in the text of ``module`` becomes ``new``. ``old`` occurs there once.

    ``first``: the program with which the search begins, to save time: it was wrong when this was written.
    """

    name: str
    module: str
    old: str
    new: str
    first: int = 0


def put_in(patch, codes):
    """Gives functions the code in ``changed_codes``. Who has the functions sees it."""
    for function, code in codes:
        patch.setattr(function, "__code__", code)


def changed_codes(wrong):
    """Yields the functions of the module, each with its code in the changed text."""
    module = importlib.import_module(f"sdfastgn.plans.rewrite.{wrong.module}")
    source = inspect.getsource(module)
    assert source.count(wrong.old) == 1, f"not once in {wrong.module}.py: {wrong.old}"
    changed = compile(source.replace(wrong.old, wrong.new), module.__file__, "exec", dont_inherit=True)
    codes = dict(named_codes(changed))
    functions = [f for f in vars(module).values() if inspect.isfunction(f)]
    for cls in filter(inspect.isclass, vars(module).values()):
        functions += filter(inspect.isfunction, vars(cls).values())
    for function in functions:
        if function.__module__ == module.__name__ and function.__qualname__ in codes:
            yield function, codes[function.__qualname__]


def named_codes(module):
    """(name, code) of each function and method in the code of a module."""
    for outer in module.co_consts:
        if isinstance(outer, types.CodeType):
            yield outer.co_name, outer
            inside = [code for code in outer.co_consts if isinstance(code, types.CodeType)]
            yield from ((f"{outer.co_name}.{inner.co_name}", inner) for inner in inside)
