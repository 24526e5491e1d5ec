"""What functions name, read from their bytecode."""

import pytest

from sdfastgn.patches.code.reading import Item, names_in

pytestmark = pytest.mark.fused_on_cpu

OPTIONS = {"up": 2, 3: "three"}


def chains(function):
    return names_in(function.__code__).chains


def test_a_global_and_what_is_read_from_it():
    def call(x):
        return F.nn.interpolate(x) + other  # noqa: F821

    assert chains(call) == {("F",), ("F", "nn"), ("F", "nn", "interpolate"), ("other",)}


def test_entries_of_dicts():
    def call(key):
        return OPTIONS["up"], OPTIONS.get("up", 1), OPTIONS[3], OPTIONS[key]

    assert chains(call) >= {("OPTIONS", Item("up")), ("OPTIONS", Item(3)), ("OPTIONS", "get")}
    assert ("OPTIONS", Item("key")) not in chains(call)


def test_a_call_ends_a_chain():
    def call(x):
        return F.first(x).second  # noqa: F821

    assert ("F", "first", "second") not in chains(call)
    assert names_in(call.__code__).attributes == {"first", "second"}


def test_functions_in_a_function():
    def call(xs):
        def inner(x):
            return F.inner(x)  # noqa: F821

        return [F.outer(inner(x)) for x in xs], lambda: F.last  # noqa: F821

    assert chains(call) >= {("F", "inner"), ("F", "outer"), ("F", "last")}


def test_variables_of_a_closure():
    factor = OPTIONS

    def call():
        return factor["up"]

    assert ("factor", Item("up")) in chains(call)


def test_what_a_function_sets():
    count = 0

    def call():
        global OPTIONS
        nonlocal count
        OPTIONS, count, local = {}, count + 1, 2
        return local

    assert names_in(call.__code__).stored == {"OPTIONS", "count"}


def test_a_method_of_the_base_class():
    class Derived(dict):
        def copy(self):
            return super().copy()

    assert "copy" in names_in(Derived.copy.__code__).attributes
