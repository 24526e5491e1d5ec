"""Compares how a module's children are called, stock and fused, when other code has replaced them."""

import copy
from collections import defaultdict
from contextlib import ExitStack, contextmanager

import pytest
from torch import Tensor, nn

# Whole models have more modules than this. In them all modules are replaced at once, but not each one alone,
# because their blocks are samples too.
MOST_ALONE = 40


class Wrapper(nn.Module):
    """A module of other code around ``module``. It has none of its attributes."""

    def __init__(self, module, note):
        super().__init__()
        self.module, self.note = module, note

    def forward(self, *args, **kwargs):
        self.note(args, kwargs)
        return self.module(*args, **kwargs)


@contextmanager
def wrapper(root, path, note):
    parent, _, name = path.rpartition(".")
    children = root.get_submodule(parent)._modules
    child, children[name] = children[name], Wrapper(children[name], note)
    try:
        yield
    finally:
        children[name] = child


@contextmanager
def subclass(root, path, note):
    child = root.get_submodule(path)
    cls = type(child)

    class Over(cls):
        def forward(self, *args, **kwargs):
            note(args, kwargs)
            return super().forward(*args, **kwargs)

    child.__class__ = Over
    try:
        yield
    finally:
        child.__class__ = cls


@contextmanager
def hook(root, path, note):
    def see(module, args, kwargs):
        note(args, kwargs)

    with root.get_submodule(path).register_forward_pre_hook(see, with_kwargs=True):
        yield


def size(value):
    """The type or shape of an argument. Tokens are only counted, because blocks over frames regroup them."""
    if not isinstance(value, Tensor):
        return type(value)
    return tuple(value.shape) if value.dim() > 3 else (value.numel(), *value.shape[-1:])


each_place = pytest.mark.parametrize("place", [wrapper, subclass, hook])


def calls_of(module, call, paths, place, optimize=None):
    """Path -> the calls of this child while ``call`` calls ``module``, each as (arguments, by keyword).

    ``optimize``: called with ``module`` after other code has placed its modules.
    """
    found = defaultdict(list)

    def noter(path):
        def note(args, kwargs):
            found[path].append((list(map(size, args)), {name: size(kwargs[name]) for name in kwargs}))

        return note

    with ExitStack() as placed:
        # Inner modules first: the path of a wrapper's child is another one.
        for path in sorted(paths, key=lambda path: -path.count(".")):
            placed.enter_context(place(module, path, noter(path)))
        if optimize is not None:
            optimize(module)
        call(module)
    return dict(found)


def are_called_as_in_stock(stock, optimize, call, place):
    """Assert that ``call`` calls each child of an optimized copy of ``stock`` as it does in ``stock``."""
    paths = [path for path, m in stock.named_modules() if path and not isinstance(m, nn.ModuleList)]
    fused = copy.deepcopy(stock)
    optimize(fused)
    for group in (paths, *([path] for path in paths if len(paths) <= MOST_ALONE)):
        try:
            expected = calls_of(stock, call, group, place)
        except (AttributeError, TypeError, RuntimeError):
            if place is not wrapper:
                raise
            continue  # stock reads attributes of a child, so that no other code can wrap it
        _agree(calls_of(fused, call, group, place), expected)
        if group is paths:
            _agree(calls_of(copy.deepcopy(stock), call, group, place, optimize), expected)


def _agree(found, expected):
    differ = {path for path in {*found, *expected} if found.get(path) != expected.get(path)}
    assert not differ, {path: {"fused": found.get(path), "stock": expected.get(path)} for path in differ}
