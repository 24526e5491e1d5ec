"""Writes the steps of a random program: what models write, and what only looks like it.

Each step writes a few lines that read a tensor of the pool. By chance it writes what a rule matches, or a
near miss: another axis, another dtype, a number between, a value that is read elsewhere, swapped operands.
"""

from __future__ import annotations

import contextlib

from tests.plans.program_steps import images, tokens, videos, views  # noqa: F401  # they fill STEPS
from tests.plans.program_steps.parts import ANY, STEPS, mask
from tests.plans.programs import Program

# Share of programs with a step that reads values or strides, which may have no plan.
READS = 0.02

REFUSED = """
if {x}.sum() > 1e9: {x} = {x} + 1
{x} = {x} * {x}.max().item()
{x} = {x}.as_strided({shape}, {strides}) * 1.0
{x}[{mask}] = 0.0
{k}.add_(1)
"""


def write(p: Program) -> None:
    """Writes 2 to 12 steps."""
    N = p.choice(1, 2, 2)
    C = p.choice(4, 8, 8)
    rank = p.choice(3, 4, 4, 5, 5)
    size = {3: (N, p.choice(3, 6, 20), C), 4: (N, C, 6, 5), 5: (N, C, p.choice(1, 3, 4), 4, 5)}[rank]
    p.pool += [p.tensor(*size, kind="x", last=p.chance(0.5)) for _ in range(p.choice(1, 2, 2))]
    reads_at = p.random.randrange(12) if p.chance(READS) else -1
    for i in range(p.random.randint(2, 12)):
        x = p.pick(*ANY)
        found = [f for ranks, steps in STEPS.items() if p.value(x).dim() in ranks for f in steps]
        with contextlib.suppress(RuntimeError, ValueError):  # shapes that this step's last line cannot take
            p.choice(*found)(p, x)
        if i == reads_at:
            x = p.pick(*ANY)
            p.may_be_refused = True
            p.do(
                p.one_of(
                    REFUSED,
                    x=x,
                    mask=mask(p, x),
                    shape=p.shape(x),
                    strides=p.value(x).stride(),
                    k=p.tensor(4, kind="k"),
                )
            )
