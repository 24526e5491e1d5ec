"""The marker ``drawn``: which cases of a test ``make test`` runs, and which ``make test-slow`` does."""

import itertools
import types

import pytest

from tests.plugin import draw, pytest_collection_modifyitems

SIZES = {"dtype": 3, "layout": 4, "operand": 5}
GRID = {
    str(case): {*zip(SIZES, case, strict=True)} for case in itertools.product(*map(range, SIZES.values()))
}


@pytest.mark.parametrize("count", [5, 7, 30])
def test_each_value_of_each_parameter_is_drawn(count):
    drawn = draw(GRID, count)
    assert len({*drawn}) == count
    assert set().union(*map(GRID.get, drawn)) == set().union(*GRID.values())


def test_the_same_cases_are_drawn_again_whatever_their_order():
    assert draw(GRID, 9) == draw(dict(reversed(GRID.items())), 9)


def test_few_cases_are_all_drawn():
    assert {*draw(GRID, 61)} == {*GRID}


class Item:
    """A collected test with the ``marks``, and with the marker ``drawn(2)``."""

    def __init__(self, test, case, *marks):
        self.nodeid, self.name = f"{test}[{case}]", f"{case}"
        self.callspec = types.SimpleNamespace(indices={"case": case})
        self.marks = {"drawn": types.SimpleNamespace(args=(2,)), **dict.fromkeys(marks, True)}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, name):
        self.marks[name] = True


def test_the_others_are_slow():
    """Two cases of each test are left as they are. Cases for a GPU are not drawn from."""
    items = [Item(test, case, *marks) for test in "ab" for marks in ((), ("gpu",)) for case in range(9)]
    pytest_collection_modifyitems(items)
    for test in "ab":
        quick = [i for i in items if i.nodeid.startswith(test) and "slow" not in i.marks]
        assert [*map(len, (quick, [i for i in quick if "gpu" not in i.marks]))] == [11, 2]
