"""Wrong rules put in on purpose: the random programs of ``test_programs.py`` see each of them.

A wrong rule is a change in the text of a rule, most often a condition that is left out.
"""

import pytest

from tests.plans import programs
from tests.plans.engine import everything_pays, planned, planned_in_slices
from tests.plans.wrong_rules import Wrong, changed_codes, put_in

pytestmark = [pytest.mark.slow, pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

# Most programs until one is wrong.
MOST = 6000


WRONG = [
    Wrong(
        "the pixels of a square change places",
        "spelling",
        "d, d + 3, d + 1, d + 4, d + 2",
        "d, d + 3, d + 2, d + 4, d + 1",
    ),
    Wrong("a mask is any triangle", "spelling", " and arguments(mask)[1] == 0 else", " else"),
    Wrong(
        "repeated rows come one after the other",
        "repeated_rows",
        "return rows, math.prod(found.sizes[end:])",
        "return rows, 1",
        3140,
    ),
    Wrong(
        "alpha of a sum is ignored", "nodes", "isinstance(b, Node) and not n.kwargs:", "isinstance(b, Node):"
    ),
    Wrong("a rounding between two casts is lost", "nodes", "return are_floats and ", "return are_floats or "),
    Wrong("two activations are one", "norms", ' or norm.args[5] != "identity":', ":"),
    Wrong(
        "a scale is any sum",
        "norms",
        "if is_one_plus(t) else None",
        "if has(t, aten.add.Tensor) else None",
        first=553,
    ),
    Wrong(
        "a shift may come before a scale",
        "norms",
        "shift is None and (scale is None or",
        "True or (scale is None or",
    ),
    Wrong("a scale of videos is one of frames", "norms", " or norm.args[8]:", ":", first=1011),
    Wrong(
        "a norm of channels has any axis", "norms", "[a % rank(x) for a in axes] == [axis]", "len(axes) == 1"
    ),
    Wrong(
        "a norm divides by the norm of another tensor",
        "norms",
        "widened(square.args[0]) is widened(x)",
        "True",
    ),
    Wrong("a norm has any order", "norms", "order == 2", "True", first=93),
    Wrong(
        "a number after a bias is not for the bias",
        "norms",
        "weight is bias is None and scale == 1 and",
        "weight is bias is None and",
        first=399,
    ),
    Wrong(
        "a parameter of a norm has any shape",
        "norms",
        "is_outside(t) and is_small and",
        "is_outside(t) and",
        first=531,
    ),
    Wrong(
        "the samples of a norm may move",
        "views",
        "if not _is_frames_as_images(x, views):",
        "if rank(x) != 5:",
        first=229,
    ),
    Wrong(
        "a bias moves to another axis",
        "sums",
        "if axis == 1 and rank(v) in (4, 5):",
        "if rank(v) in (4, 5):",
        first=182,
    ),
    Wrong("the divisor of a sum is ignored", "sums", "float(divisor))", "1.0)"),
    Wrong("the second activation of a sum replaces the first", "sums", " or len(total.args) > i:", ":"),
    Wrong("both GELUs are one", "norms", 'n.kwargs.get("approximate") == "tanh"', "False", first=54),
    Wrong("one of two biases is lost", "sums", "if len(biases) == 2:", "if len(biases) == 3:", first=434),
    Wrong(
        "the bias before an embedding is lost",
        "sums",
        "return h.args[0], r.like(aten.add.Tensor, (shift, h.args[1]), shift)",
        "return h.args[0], shift",
    ),
    Wrong(
        "any frames are all but copies of the first",
        "repeats",
        "n.args[1:] != cut)",
        "n.args[1] != 2)",
        first=76,
    ),
    Wrong("a pad is in no cell", "cats", "source if all(", "source if any(", first=137),
    Wrong(
        "a mean is of any windows",
        "spelling",
        "if not is_usual or cell != step:",
        "if not is_usual:",
        first=102,
    ),
    Wrong(
        "windows that overlap are cells", "cells", "list(stride) == kernel and", "len(stride) and", first=76
    ),
    Wrong("the number of the smaller cells is lost", "cells", "scale * first_scale)", "scale)", first=336),
    Wrong(
        "sums of cells of any value are side by side",
        "cells",
        "any(c.x is not chains[0].x for c in chains):\n        return None\n    filters_",
        "False:\n        return None\n    filters_",
        first=1092,
    ),
    Wrong(
        "sums of cells are divided by what they are multiplied by",
        "cells",
        "if has(n, aten.mul.Tensor) else scale / factor",
        "if factor else scale",
        first=831,
    ),
    Wrong(
        "channels may be added twice",
        "cells",
        "starts != list(range(0, shape(chains[0].x)[1], shape(n)[1]))",
        "len(starts) * shape(n)[1] != shape(chains[0].x)[1]",
        first=76,
    ),
    Wrong(
        "a number of each channel is one of each frame",
        "blends",
        "if is_small and is_here and",
        "if rank(factor) != 1 and is_here and",
    ),
    Wrong(
        "the input of a block counts once in a mix with the block",
        "blends",
        "h, x, total, factors[1])",
        "h, x, *factors)",
        first=12,
    ),
    Wrong(
        "any sum has the other side of a mix",
        "blends",
        "if other is x and h",
        "if h",
        first=147,
    ),
    Wrong(
        "the value of a pad along time is ignored",
        "frames",
        "min(pads) < 0 or value != 0:",
        "min(pads) < 0:",
    ),
    Wrong(
        "any frames are the last frames",
        "frames",
        "u.args[1] == 2 and u.args[2] + u.args[3] == shape(x)[2]:",
        "u.args[1] == 2:",
        first=339,
    ),
    Wrong(
        "one frame after anything is one frame after zeros",
        "frames",
        ' and (mode, value) == ("constant", 0)',
        "",
        first=163,
    ),
    Wrong(
        "the value of a pad is ignored",
        "convolutions",
        'x.args[2:] != ("constant", 0.0)',
        'x.args[2] != "constant"',
        first=177,
    ),
    Wrong(
        "a pad of one side is on both",
        "convolutions",
        "own = [a if a == b else 0 for a, b in axes]",
        "own = [max(a, b) for a, b in axes]",
    ),
    Wrong(
        "frames of other samples are repeated",
        "convolutions",
        "if video.args[1] != TO_FRAMES or shape",
        "if shape",
        first=272,
    ),
    Wrong(
        "the first frame is repeated like others",
        "convolutions",
        "(times[0], 1, 1), first_once)",
        "(times[0], 1, 1), False)",
        first=1342,
    ),
    Wrong(
        "any activation of a convolution is ReLU",
        "convolutions",
        'total.args[-1] != "relu":',
        "not isinstance(total.args[-1], str):",
    ),
    Wrong(
        "any convolution after upsampling has phases",
        "convolutions",
        "if shape(weight)[2:] != (3, 3) or numbers != ((1, 1), (1, 1), (1, 1), 1):",
        "if shape(weight)[2:] != (3, 3):",
        first=236,
    ),
    Wrong(
        "a product is added in place though others read the sum",
        "tokens",
        "norm.args[0] is before and set(before.users) == {total, norm}",
        "norm.args[0] is before",
        first=78,
    ),
    Wrong(
        "the value is activated in place of the gate",
        "tokens",
        "(value, applied(r, views, gate), name)",
        "(applied(r, views, gate), value, name)",
    ),
    Wrong("a gate is not moved", "tokens", "applied(r, views, gate)", "r.reshape(gate, shape(n))", first=131),
    Wrong(
        "one column is the gate of all",
        "tokens",
        "shape(value) == shape(factor) == shape(n)",
        "True",
        first=311,
    ),
    Wrong(
        "an activation is never rounded",
        "tokens",
        "elif uncast(n, root) is n:",
        "elif not has(n, steps.cast):",
        first=131,
    ),
    Wrong(
        "a second bias replaces a second bias",
        "tokens",
        "is_only(y) and y.args[4] is None and",
        "is_only(y) and",
    ),
    Wrong(
        "each part has the first columns of a weight",
        "tokens",
        "r.cut(weight, 1, start,",
        "r.cut(weight, 1, 0,",
        first=51,
    ),
    Wrong("a cat is of rows", "tokens", " or cat.args[1] != rank(cat) - 1 or", " or", first=626),
    Wrong("parts in any order are the whole", "cats", "p.args[1:3] != (dim, end):", "p.args[1] != dim:"),
    Wrong(
        "parts come before another axis",
        "cats",
        "(*others[:at], axis, *others[at:])",
        "(*others[:1], axis, *others[1:])",
    ),
    Wrong(
        "the parts in a sum are the same part of both",
        "moves",
        "and a.args[1:] == b.args[1:]:",
        "and a.args[1] == b.args[1] and a.args[3] == b.args[3]:",
        first=375,
    ),
    Wrong(
        "a part of a cell is the whole cell",
        "moves",
        "start % inner == length % inner == 0",
        "start % inner == 0",
        first=977,
    ),
    Wrong(
        "a bias before views is added after them",
        "moves",
        "applied(r, views, every)",
        "applied(r, views, h)",
    ),
    Wrong(
        "a mean is in the dtype of what it reads",
        "moves",
        "if not axes or to is not None or",
        "if not axes or",
    ),
    Wrong(
        "zeros come before frames that are repeated",
        "frames",
        'if source.of_time != "replicate" or source.mode is None:',
        "if source.mode is None:",
        first=1672,
    ),
    Wrong(
        "repeated frames do not count in the norm after them",
        "frames",
        "activation, pads_first=True)",
        "activation)",
        first=1071,
    ),
    Wrong(
        "pads beside the frames count in the norm after them",
        "frames",
        '!= ("replicate", None)',
        '!= ("replicate", inner.of_image)',
        first=335,
    ),
    Wrong(
        "the last mean may be one of fewer elements",
        "spelling",
        "if used > shape(x)[axis]:",
        "if False:",
        first=98,
    ),
    Wrong(
        "parts after different views are parts of one video",
        "views",
        "(p.axis, p.kept, p.views) != (first.axis, first.kept, first.views)",
        "p.kept != first.kept",
        first=175,
    ),
    Wrong(
        "a modulation may depend on the sum before the norm",
        "ada_norms",
        "if total is not None and _depends(after, norm.x, places):",
        "if False:",
        first=64,
    ),
    Wrong("the bias of a part is lost", "ada_norms", "elif bias is not None:", "elif False:", first=211),
    Wrong(
        "a gate has any number of columns",
        "ada_norms",
        "and whole[-1] == shape(root)[-1]",
        "",
        first=278,
    ),
    Wrong(
        "a rounding inside of a modulated norm is lost",
        "ada_norms",
        "if torch.promote_types(dtype(n), dtype(root)) != dtype(n):",
        "if False:",
        first=131,
    ),
    Wrong(
        "pairs are turned in either direction",
        "rotations",
        "_part(first.args[0], 1, D, halves) is x and _part(second, 0, D, halves) is x",
        "True",
        first=316,
    ),
    Wrong(
        "halves are pairs of neighbors",
        "rotations",
        "_Rotation(x, cos, sin, halves)",
        "_Rotation(x, cos, sin)",
        first=96,
    ),
    Wrong("each part of heads has the first rows of a table", "heads", "where = 1, start,", "where = 1, 0,"),
    Wrong(
        "heads are rotated once",
        "heads",
        "not found.has_norm and all(p.cos is None for p in parts)",
        "not found.has_norm",
        first=238,
    ),
    Wrong("a norm of heads has no bias", "heads", "eps=found.added / D, bias=bias)", "eps=found.added / D)"),
    Wrong("a norm of heads has any scale", "heads", "found.eps or found.scale != math.sqrt(D)", "found.eps"),
    Wrong("rows may be cut", "heads", "n.args[1] != last if has(n, steps.cut)", "True if has(n, steps.cut)"),
    Wrong("a norm is of rows of any length", "heads", "else shape(n)[-1:] == shape(below)[-1:]", "else True"),
    Wrong("heads are joined along any axis", "heads", "or dim not in (1, 2)", ""),
    Wrong(
        "results share memory",
        "finish",
        'if owner is not None and (owner in seen or owner.op != "call_function"):',
        "if False:",
    ),
    Wrong("frames of any number are zeros", "cats", " and n.args[1] == 0", "", first=19),
    Wrong(
        "parts have any borders",
        "cats",
        "if len(others) > 1 or any(along[1:-1]):",
        "if any(along[1:-1]):",
        first=1291,
    ),
    Wrong(
        "pads between parts are lost",
        "cats",
        "if len(others) > 1 or any(along[1:-1]):",
        "if len(others) > 1:",
        first=12,
    ),
    Wrong(
        "pads of parts have the mode of the first",
        "cats",
        "p.args[2:] == parts[0].args[2:] for p",
        "True for p",
        first=2608,
    ),
    Wrong("a part reflects itself", "cats", ' or (mode == "reflect" and (before or after))', "", first=679),
    Wrong(
        "the pads in a part are before it",
        "cats",
        "begin - first, last - end",
        "begin - first + last - end, 0",
        first=1773,
    ),
    Wrong("parts that are convolved lie anywhere", "frames", "c.args[2] != last or ", "", first=543),
    Wrong("all parts have the first weight", "frames", " or part.args[1:] != others", "", first=1153),
    Wrong("any slice of a weight is the last", "frames", " or start != shape(whole)[2] - 1:", ":", first=64),
    Wrong(
        "others read the first padded frames", "frames", "user(n)), 2, front,", "user(n)), 2, 0,", first=405
    ),
    Wrong(
        "the last frames may be pads",
        "frames",
        "(source.back or source.times != _ONCE)",
        "source.times != _ONCE",
        first=1029,
    ),
    Wrong(
        "kept frames are not enlarged",
        "frames",
        "(source.back or source.times != _ONCE)",
        "source.back",
        first=155,
    ),
    Wrong(
        "a cache comes before frames that are repeated",
        "frames",
        "if source.cache is not None:\n            return None\n        source",
        "source",
        first=5015,
    ),
    Wrong(
        "hidden keys are those with any number",
        "spelling",
        "is_seen | (values == -math.inf) if values.is_floating_point() else is_seen == values",
        "is_seen | True",
        first=1539,
    ),
    Wrong(
        "a mask has the same meaning in any dtype",
        "spelling",
        "if dtype(n).is_floating_point != dtype(n.args[0]).is_floating_point:",
        "if False:",
        first=1147,
    ),
    Wrong(
        "one number for all keys is for the first",
        "spelling",
        " and shape(k)[2] == shape(mask)[-1]:",
        ":",
        first=237,
    ),
    Wrong(
        "keys that are seen are the first",
        "spelling",
        "not torch.equal(is_seen, is_first) or ",
        "",
        first=191,
    ),
    Wrong(
        "each row of a mask is the next", "spelling", "counts[which]", "counts[which.sort()[0]]", first=800
    ),
    Wrong("samples may be mixed", "slices", "axis is None or axis in along", "axis is None"),
    Wrong("samples may be anywhere after a reshape", "slices", " and math.prod(after[:i]) == outer", ""),
    Wrong("a sample has any number of elements", "slices", "size % samples == 0 and ", "", 879),
    Wrong("operands are aligned at the first axis", "slices", "rank(n) - rank(a) for", "0 for", 360),
    Wrong("a tensor of all samples has any size", "slices", "if others or size != (", "if others and ("),
    Wrong("samples have the same values", "slices", "_is_equal_along_samples(n, samples) else", "True else"),
]


@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.name) for wrong in WRONG])
def test_a_wrong_rule_is_seen(wrong, monkeypatch):
    everything_pays(monkeypatch)
    codes = [*changed_codes(wrong)]
    plan_of = planned_in_slices if wrong.module == "slices" else planned
    for seed in (*range(wrong.first, MOST), *range(wrong.first)):
        program = programs.Program(seed)
        if program.may_be_refused:
            continue
        with monkeypatch.context() as patch:
            put_in(patch, codes)
            found = fault(program, plan_of)
        if found and not fault(program, plan_of):  # it is the wrong rule that makes the program wrong
            return
    pytest.fail(f"{MOST} programs are right with this wrong rule: {wrong.name}")


def fault(program, plan_of):
    try:
        return programs.fault(program, plan_of)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
