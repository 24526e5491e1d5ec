"""Random programs: small functions of tensors, as text, that a plan must compute as eager PyTorch does.

The steps that a program is made of are in the folder ``program_steps``. A program reads inputs (``x0``),
parameters of a module (``m.p1``) and tensors of a closure (``k2``), and returns a list of tensors. The same
seed makes the same program.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Largest relative difference of a result from eager's, by the dtype of the program. Sums in another order
# differ by less. A wrong rule differs by more.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-8, torch.bfloat16: 4e-2}
# Programs in fp32 may round some values to bfloat16. There, a difference of 1e-7 before the rounding can
# become one of 4e-3, in a few elements. A lost rounding differs by 1e-3 in most of them. So the middle one of
# all differences counts, relative to the root of the mean square.
ROUNDED = 1e-4
# The largest relative difference for programs in fp64 that round some values to fp32.
SINGLE = 1e-6
# A result with a larger difference may differ from fp64's result by FACTOR times as much as eager's result,
# and by SLACK. The factor for rounding in another order is up to 16: an instance norm of values that differ
# by a thousandth sums them in the order of their layout.
FACTOR, SLACK = 20, {torch.float32: 1e-6, torch.float64: SINGLE, torch.bfloat16: 1e-2}
# Dtypes of programs, as often as they occur.
DTYPES = (torch.float32,) * 6 + (torch.float64, torch.bfloat16)
# Tensors with more elements than this are not read by further steps.
LARGEST = 12_000


class Leaf(NamedTuple):
    """A tensor that a program reads. ``name``: as the text of the program calls it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    channels_last: bool

    def draw(self, generator: torch.Generator) -> Tensor:
        x = (torch.randn(self.shape, generator=generator) * self.scale).to(self.dtype)
        if not self.channels_last:
            return x
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last)


class Program:
    """The program of ``seed``.

    ``lines`` are its statements, ``outputs`` the expressions that it returns, ``leaves`` what it reads. While
    the program is written, each statement runs, so that steps know the shapes of values.
    """

    def __init__(self, seed: int) -> None:
        from tests.plans.program_steps.write import write

        self.seed = seed
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice(DTYPES)
        self.leaves: list[Leaf] = []
        self.lines: list[str] = []
        self.names = {"torch": torch, "F": F, "m": nn.Module()}
        self.pool: list[str] = []
        self.may_be_refused = False  # it has a step that reads values
        with torch.no_grad():
            write(self)
        self.outputs = self._outputs()
        words = set(re.findall(r"\w+", "\n".join([*self.lines, *self.outputs])))
        self.leaves = [leaf for leaf in self.leaves if leaf.name.split(".")[-1] in words]
        self.names.clear()

    # ---- what steps ask

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, *options: Any) -> Any:
        return self.random.choice(options)

    def one_of(self, expressions: str, **names: Any) -> str:
        """One of the lines of ``expressions``, with ``names`` filled in."""
        return self.choice(*expressions.strip().splitlines()).format(**names)

    def value(self, name: str) -> Any:
        return eval(name, self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.value(name).shape)

    def is_writable(self, name: str) -> bool:
        x = self.value(name)
        return not any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))

    def pick(self, *ranks: int) -> str:
        """The name of a tensor of the pool with one of these ranks. Late ones are more likely."""
        found = [name for name in self.pool if self.value(name).dim() in ranks]
        return found[-1 - int(len(found) * self.random.random() ** 3)]

    def has(self, *ranks: int) -> bool:
        return any(self.value(name).dim() in ranks for name in self.pool)

    def other(self, x: str) -> str:
        """A tensor of the pool with the shape and dtype of ``x``, sometimes x itself."""
        same = self.shape(x), self.value(x).dtype
        return self.choice(*[y for y in [x, *self.pool] if (self.shape(y), self.value(y).dtype) == same])

    # ---- what steps write

    def tensor(
        self, *shape: int, scale: float = 1.0, dtype: Any = None, kind: str = "", last: bool = False
    ) -> str:
        """A new tensor that the program reads: an input (x), a parameter (p) or a closure's (k)."""
        kind = kind or self.choice("p", "p", "p", "p", "x", "k")
        name = f"{'m.' * (kind == 'p')}{kind}{len(self.leaves)}"
        leaf = Leaf(name, shape, dtype or self.dtype, scale, last and len(shape) in (4, 5))
        self.leaves.append(leaf)
        put(self.names, name, leaf.draw(self.generator))
        return name

    def do(self, statement: str) -> None:
        exec(statement, self.names)
        self.lines.append(statement)

    def let(self, expression: str) -> str:
        """The name of a new value, which further steps do not see."""
        name = f"y{len(self.lines)}"
        self.do(f"{name} = {expression}")
        return name

    def add(self, expression: str) -> str:
        """The name of a new value, which further steps may read."""
        name = expression if expression.isidentifier() else self.let(expression)
        x = self.value(name)
        # A norm over one channel is a sign, which magnifies rounding. On a CPU, PyTorch 2.13 computes some
        # convolutions of one channel in bf16 wrongly.
        has_channels = x.dim() < 4 or x.shape[1] > 1
        if name not in self.pool and 0 < x.numel() <= LARGEST and x.is_floating_point() and has_channels:
            self.pool.append(name)
        return name

    def _outputs(self) -> list[str]:
        """The last value, all that nobody reads, some others, and sometimes a view or the same one again."""
        words = Counter(re.findall(r"\w+", "\n".join(self.lines)))
        written = {line.split("[")[0].split(".")[0] for line in self.lines if not re.match(r"\w+ = ", line)}
        made = [name for name, x in self.names.items() if name[0] == "y" and isinstance(x, Tensor)]
        found = [y for y in made if words[y] == 1 or self.chance(0.6 if y in written else 0.12)]
        found = found or made[-1:] or ["x0"]
        if self.chance(0.1):
            found.append(self.choice(*self.pool))
        if self.chance(0.1):
            name = self.choice(*found)
            if self.shape(name):
                found.append(f"{name}[:1]" if self.chance(0.5) else f"{name}.movedim(0, -1)")
        return found

    # ---- the program as text, and as a function

    @property
    def inputs(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.name[0] == "x"]

    def __str__(self) -> str:
        head = f"def program({', '.join(leaf.name for leaf in self.inputs)}):"
        return "\n    ".join([head, *self.lines, f"return [{', '.join(self.outputs)}]"])

    def described(self) -> str:
        """The text, with the tensors that it reads."""
        tensors = [
            f"{leaf.name}: {leaf.shape} {str(leaf.dtype)[6:]}{' channels-last' * leaf.channels_last}"
            for leaf in self.leaves
        ]
        return f"seed {self.seed}; {'; '.join(tensors)}\n{self}"

    def bound(self, values: list[Tensor], text: str | None = None) -> Bound:
        """The program as a function, with these values of its leaves."""
        names: dict[str, Any] = {"torch": torch, "F": F, "m": nn.Module()}
        inputs = [put(names, leaf.name, x) for leaf, x in zip(self.leaves, values, strict=True)]
        exec(text or str(self), names)
        called = [x for leaf, x in zip(self.leaves, inputs, strict=True) if leaf.name[0] == "x"]
        return Bound(names["m"], names["program"], called, inputs)

    def exact(self, values: list[Tensor]) -> list[Tensor]:
        """The results in fp64, with all that the program rounds to another dtype."""
        text = str(self).replace(".float()", ".double()").replace("torch.float32", "torch.float64")
        if self.dtype == torch.bfloat16:
            text = text.replace("torch.bfloat16", "torch.float64")
        bound = self.bound([x.double() if x.is_floating_point() else x.clone() for x in values], text)
        return [*same_random_numbers(bound.function, bound.inputs), *bound.leaves]


class Bound(NamedTuple):
    """A program with values: its module, its function, the tensors to call it with, and all that it reads."""

    module: nn.Module
    function: Callable[..., list[Tensor]]
    inputs: list[Tensor]
    leaves: list[Tensor]


def put(names: dict[str, Any], name: str, x: Tensor) -> Tensor:
    """Makes ``name`` stand for ``x`` in a program. Returns what the program reads."""
    if not name.startswith("m."):
        names[name] = x
        return x
    parameter = nn.Parameter(x, requires_grad=False)
    names["m"].register_parameter(name[2:], parameter)
    return parameter


# ---- plan against eager


def same_random_numbers(function: Callable[..., Any], inputs: Iterable[Any]) -> Any:
    """``function(*inputs)``. PyTorch's random generator has its former state afterwards."""
    with torch.random.fork_rng([]):
        return function(*inputs)


def fault(program: Program, plan_of: Callable[..., Callable[..., Any]]) -> str:
    """What is wrong with the plan of ``program``; empty if it is right.

    The plan is traced with one set of values, and called with two others. Each time the results are compared
    with eager's, and all tensors that the program may have written. ``plan_of(module, function, *inputs)``
    makes the plan. What it raises is not caught.
    """
    generator = torch.Generator().manual_seed(program.seed + 1)
    traced = program.bound([leaf.draw(generator) for leaf in program.leaves])
    plan = plan_of(traced.module, traced.function, *traced.inputs)
    earlier: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        values = [leaf.draw(generator) for leaf in program.leaves]
        eager = program.bound([x.clone() for x in values])
        expected = [*same_random_numbers(eager.function, eager.inputs), *eager.leaves]
        for x, y in zip(traced.leaves, values, strict=True):
            x.copy_(y)
        inputs = [x.clone() for x in traced.inputs]
        results = same_random_numbers(plan, inputs)
        after = iter(inputs)
        leaves = [
            next(after) if x.name[0] == "x" else y for x, y in zip(program.leaves, traced.leaves, strict=True)
        ]
        found = _difference(program, values, expected, [*results, *leaves])
        if found:
            return found
        if not all(torch.equal(x, y) for x, y in earlier):
            return "the second call changed a result of the first"
        earlier = [(x, x.clone()) for x in results if torch.isfinite(x).all()]
    return ""


def _difference(program: Program, values: list[Tensor], expected: list[Tensor], found: list[Tensor]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} results, not {len(expected)}"
    names = [*program.outputs, *[leaf.name for leaf in program.leaves]]
    tolerance = TOLERANCES[program.dtype]
    rounds = program.dtype != torch.bfloat16 and "bfloat16" in str(program)
    is_judged = program.dtype != torch.float64
    if program.dtype == torch.float64 and ".float()" in str(program):
        tolerance, is_judged = SINGLE, True
    exact: list[Tensor] = []
    for i, (name, x, y) in enumerate(zip(names, expected, found, strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} is {tuple(y.shape)} {y.dtype}, not {tuple(x.shape)} {x.dtype}"
        error = relative(y, x)
        if error <= tolerance or (rounds and error < 0.02 and middle(y, x) <= ROUNDED):
            continue
        if is_judged and i < len(program.outputs):
            exact = exact or program.exact(values)
            if relative(y, exact[i]) <= FACTOR * relative(x, exact[i]) + SLACK[program.dtype]:
                continue  # the program magnifies rounding
        return f"{name} {tuple(x.shape)} is off by {error:.1e}"
    return ""


def relative(x: Tensor, to: Tensor) -> float:
    """|x - to| / |to|; zero if ``to`` has values that are not finite: they cannot be compared."""
    if not torch.isfinite(to).all():
        return 0.0
    x, to = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, to))
    error = ((x - to).norm() / to.norm().clamp_min(1e-3)).item()
    return error if error == error else float("inf")


def middle(x: Tensor, to: Tensor) -> float:
    """The median of |x - to|, relative to the root of the mean square of ``to``."""
    return ((x - to).abs().median() / to.square().mean().sqrt().clamp_min(1e-3)).item()


def reduced(program: Program, is_wrong: Callable[[Program], bool]) -> Program:
    """Leaves out all lines and outputs of ``program`` without which it is still wrong."""

    def still_wrong() -> bool:
        try:
            return is_wrong(program)
        except Exception:  # without this line it is no program
            return False

    for part in (program.outputs, program.lines):
        for i in reversed(range(len(part))):
            line = part.pop(i)
            if not still_wrong():
                part.insert(i, line)
    return program
