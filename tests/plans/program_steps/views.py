"""Steps of any tensor: views, copies, writes, numbers and masks."""

from __future__ import annotations

from tests.plans.program_steps.parts import ANY, cast, channels, mask, step
from tests.plans.programs import Program

VIEWS = """
{x}.clone()
{x}.contiguous()
{x}[:, :, -2:]
{x}[:, 1:]
{x}[:, ::2]
{x}.transpose(1, 2).contiguous().transpose(1, 2)
{x}.transpose(-1, -2).reshape{shape}
{x}.reshape({shape}[0], -1).reshape{shape}
{x}.view{shape}
{x}.flip(1)
{x}.roll(1, 2)
{x}.detach()
{x}.unsqueeze(0).squeeze(0)
{x}[:, :1].expand_as({x})
torch.stack([{x}, {x}], 1).sum(1)
torch.cat([{x}[:, :1], {x}[:, 1:]], 1)
torch.cat([{x}[:, 1:], {x}[:, :1]], 1)
torch.cat({x}.chunk(2, 1), 1)
torch.cat({x}.chunk(2, 1)[::-1], 1)
torch.cat({x}.split(1, 2), 2)
"""


@step(ANY, 2)
def view(p: Program, x: str) -> None:
    p.add(p.one_of(VIEWS, x=x, shape=p.shape(x)))


NUMBERS = """
{x} * 0.5
{x} / 1.0
{x} + 0
{x} * 1
{x} - 0.0
{x} / 2
-{x}
1 - {x}
{x}.clamp(-1, 1)
{x} * {x}.abs()
torch.where({mask}, {x}, 0.5)
{x}.masked_fill({mask}, 0.0)
F.softmax({x}, -1)
{x} - {x}.mean(1, keepdim=True)
F.dropout({x}, 0.5, False)
{x} * torch.arange({last}).to({x}.dtype)
torch.tensor([0.5] * {last}).to({x}.dtype) + {x}
F.glu({x}, 1)
F.avg_pool2d({x}, 2)
{x}.sin()
{x} + torch.randn({last}).to({x}.dtype)
"""


@step(ANY, 2)
def number_or_mask(p: Program, x: str) -> None:
    p.add(p.one_of(NUMBERS, x=x, mask=mask(p, x), last=p.shape(x)[-1]))


@step(ANY)
def rounded(p: Program, x: str) -> None:
    p.add(cast(p, x))


WRITES = """
{x}.add_({y})
{x}.mul_(0.5)
{x}.copy_({y})
{x}.clamp_(-2, 2)
{x}.lerp_({y}, 0.5)
{x}.div_({y}.abs() + 1)
{x}.masked_fill_({mask}, 0.5)
{x}.detach().add_(0.5)
F.silu({x}, inplace=True)
F.relu({x}, inplace=True)
torch.add({y}, 1.0, out={x})
torch.mul({y}, {y}, out={x})
torch.cat([{y}[:, :1], {y}[:, 1:]], 1, out={x})
{x}[:, :1] = 2.0
{x}[:, :1] = {y}[:, -1:]
{x}[:, -1] = {x}[:, 0]
{x}[:, 0].zero_()
{x}[..., ::2] += 1
{x}.transpose(1, 2)[:, :1].add_(1)
{x}.flatten(1)[:, :2] *= 2.0
{x}.unbind(1)[0].mul_(3)
{x}.chunk(2, -1)[0].sub_(1)
{x}.movedim(1, -1)[..., :1].copy_({x}.movedim(1, -1)[..., -1:])
"""


@step(ANY, 3)
def written(p: Program, x: str) -> None:
    """A write in place, whole or in part."""
    if p.is_writable(x):
        p.do(p.one_of(WRITES, x=x, y=p.other(x), mask=mask(p, x)))


MADE = """
{x} * 1.5
torch.zeros_like({x})
{x}.clone()
F.silu({x})
"""
KEPT = """
{t}.clone()
{t}.contiguous()
{t}.transpose(1, 2).contiguous()
{t}.movedim(1, -1).contiguous()
{t}.movedim(1, -1).contiguous().movedim(-1, 1)
{t}.permute({same}).contiguous()
{t}[:, :1].contiguous()
{t}[:, ::2].contiguous()
{t}[:, :, -1:].contiguous()
{t}[:1].contiguous()
{t}[:, 0].contiguous()
{t}.chunk(2, 1)[0].contiguous()
{t}[:, :1].expand_as({t}).contiguous()
{t}[:, :1].expand_as({t})
{t}[:, :1]
{t}.reshape(-1)
{t}.view(-1).view{shape}
{t}.transpose(1, 2).reshape{shape}
{t}.flatten(1)
{t}.transpose(1, 2).flatten(1)
{t}.unflatten(0, (1, -1))
{t}.movedim(1, -1)
{t}.to({t}.dtype)
{t}.type_as({x})
{t}.double().to({t}.dtype)
"""
BASE_WRITES = """
{t}.mul_(2)
{t}.zero_()
{t}[:, :1] = 3.0
{t}.add_({t}.mean())
{t}[:, :, -1].add_(1)
"""


@step(ANY, 2)
def kept_and_written(p: Program, x: str) -> None:
    """A view or a copy that is kept, then a write to its base or to itself."""
    shape = p.shape(x)
    t = p.tensor(*shape, kind="x") if p.chance(0.3) else p.let(p.one_of(MADE, x=x))
    if p.chance(0.4):
        p.do(p.one_of(BASE_WRITES, t=t))
    kept = p.let(p.one_of(KEPT, t=t, x=x, shape=shape, same=tuple(range(len(shape)))))
    p.do(p.one_of(BASE_WRITES, t=t))
    if p.chance(0.3) and p.is_writable(kept):
        p.do(p.choice(f"{kept}.add_(1)", f"{kept}[:1] = 0.5", f"{kept}.mul_({kept})"))
    if p.chance(0.6):
        p.add(t)
    if p.shape(kept) == shape:
        p.add(f"{kept} + {x}")
    elif p.value(kept).dim() in ANY:
        p.add(kept)


@step(ANY)
def filled_in_parts(p: Program, x: str) -> None:
    """A new tensor that is written in parts, as tiles and buffers are."""
    shape, y = p.shape(x), p.other(x)
    new = p.choice(
        f"torch.zeros_like({x})",
        f"torch.empty_like({x})",
        f"{x}.new_zeros({shape})",
        f"torch.full({shape}, 0.5, dtype={x}.dtype)",
        f"{x}.clone()",
    )
    t = p.let(new)
    if "empty" in new:
        p.do(f"{t}[:, :1] = {x}[:, :1]")
        p.do(f"{t}[:, 1:] = {y}[:, 1:] * 0.5")
    else:
        p.do(f"{t}[:, :, :1] = {x}[:, :, :1]" if p.chance(0.7) else f"{t}[:, :, 0] += {x}[:, :, -1]")
        if p.chance(0.4):
            p.add(p.let(f"{t}.clone()"))
        if p.chance(0.6):
            p.do(
                p.choice(
                    f"{t}[:, -1] = {y}[:, 0]",
                    f"{t}[..., 1:] += {y}[..., 1:]",
                    f"{t}[:, :, :1].mul_({t}[:, :, :1])",
                )
            )
    p.add(t)


@step(ANY)
def state_written(p: Program, x: str) -> None:
    """A write to a tensor of the module, and a read of it."""
    if p.chance(0.4):
        t = p.tensor(channels(p, x), kind="p")
        p.do(p.choice(f"{t}.add_(1)", f"{t}[:2] = 0.25", f"{t}.mul_(0.5)"))
        p.add(f"{x} + {t}" if p.value(x).dim() == 3 else f"{x} + {t}[:{', None' * (p.value(x).dim() - 2)}]")
