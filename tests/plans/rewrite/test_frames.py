"""What a convolution of frames reads is prepared by one step."""

import functools

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.statistics.plain import reference_channel_statistics
from sdfastgn.plans.run import steps
from tests.kernels.samples import kernels
from tests.plans.rewrite.rewriting import checked, steps_of

CAUSAL = (1, 1, 1, 1, 2, 0)


def video(T=4, C=4):
    return torch.randn(2, C, T, 5, 6)


@pytest.fixture
def weight():
    return torch.randn(4, 4, 3, 3, 3)


def frames_of(plan):
    """The arguments of each ``steps.frames``, by name."""
    fields = ("x", "cache", "front", "back", "border", "mode", "keep", "shift", "norm", "times", "window")
    return [dict(zip(fields, n.args, strict=True)) for n in plan.all(steps.frames)]


def group_norm(x):
    return F.silu(F.group_norm(x, 2))


def channel_norm(x):
    return F.silu(F.normalize(x, dim=1) * 2.0)


def repeated(x, front, back=0):
    return torch.cat([x[:, :, :1]] * front + [x] + [x[:, :, -1:]] * back, 2)


# ---- pads


def test_frames_before_a_convolution(weight):
    plan = checked(lambda x: F.conv3d(F.pad(x, CAUSAL), weight), video())
    assert plan.steps == ["frames", "conv"]
    (found,) = frames_of(plan)
    assert (found["front"], found["back"], found["border"], found["mode"]) == (2, 0, (0, 0), "zeros")
    assert plan.calls[1].args[4] == [0, 1, 1]


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (lambda x: F.pad(x, (1, 1, 2, 2, 2, 1), mode="replicate"), (2, 1, (2, 1), "replicate")),
        (lambda x: repeated(x, 2, 1), (2, 1, (0, 0), "replicate")),
        (lambda x: F.pad(repeated(x, 2), (1, 1, 1, 1, 0, 0), mode="replicate"), (2, 0, (1, 1), "replicate")),
        (lambda x: F.pad(repeated(x, 2), (1, 1, 2, 2, 0, 0), mode="reflect"), (2, 0, (2, 1), "reflect")),
        (lambda x: F.pad(repeated(x, 2), (1, 1, 1, 1)), (2, 0, (0, 0), "replicate")),
        (lambda x: F.pad(x, (1, 1, 2, 2, 0, 0), mode="reflect"), (0, 0, (2, 1), "reflect")),
    ],
)
def test_modes(weight, pad, expected):
    plan = checked(lambda x: F.conv3d(pad(x), weight), video())
    assert plan.steps == ["frames", "conv"]
    (found,) = frames_of(plan)
    assert (found["front"], found["back"], found["border"], found["mode"]) == expected


def test_the_padding_of_the_convolution_is_around_the_frames(weight):
    replicate = checked(lambda x: F.conv3d(F.pad(x, CAUSAL, mode="replicate"), weight, padding=1), video())
    zeros = checked(lambda x: F.conv3d(F.pad(x, CAUSAL), weight, padding=(1, 0, 1)), video())
    assert replicate.steps == zeros.steps == ["frames", "conv"]


@pytest.mark.parametrize(
    "pad",
    [
        lambda x: F.pad(x, CAUSAL, value=1.0),
        lambda x: F.pad(x, (1, 1, 1, 1, 2, 1), mode="reflect"),
        lambda x: F.pad(x, (0, 1, 0, 1, 2, 0), mode="replicate"),
        lambda x: F.pad(x, (1, 0, 0, 0, 2, 0)),
    ],
)
def test_other_pads_stay(weight, pad):
    assert steps_of(lambda x: F.conv3d(pad(x), weight), video()) == ["pad", "conv"]


def test_pads_that_do_not_commute(weight):
    zeros_inside = checked(
        lambda x: F.conv3d(F.pad(F.pad(x, (1, 1, 1, 1)), (1, 1, 1, 1, 2, 0), mode="replicate"), weight),
        video(),
    )
    zeros_outside = checked(
        lambda x: F.conv3d(F.pad(F.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate"), CAUSAL), weight), video()
    )
    assert zeros_inside.steps == ["pad", "frames", "conv"]
    assert zeros_outside.steps == ["pad", "frames", "conv"]


def test_a_pad_that_is_read_twice_stays(weight):
    def call(x):
        x = F.pad(x, CAUSAL, mode="replicate")
        return F.conv3d(x, weight), F.conv3d(x, weight, stride=2)

    assert steps_of(call, video()) == ["pad", "conv", "conv"]


# ---- caches


def test_a_cache_and_zeros_before_it(weight):
    plan = checked(
        lambda c, x: F.conv3d(F.pad(torch.cat([c, x], 2), (1, 1, 1, 1, 1, 0)), weight), video(1), video()
    )
    assert plan.steps == ["frames", "conv"]
    (found,) = frames_of(plan)
    assert (found["cache"].op, found["front"], found["mode"]) == ("placeholder", 2, "zeros")


def test_a_cache_whose_first_frame_is_repeated(weight):
    def call(c, x):
        return F.conv3d(F.pad(torch.cat([c, x], 2), CAUSAL, mode="replicate"), weight)

    plan = checked(call, video(2), video())
    assert plan.steps == ["frames", "conv"]


def test_other_cats_stay(weight):
    double = lambda x: torch.cat([x, x], 1)  # noqa: E731
    wide = torch.randn(4, 8, 3, 3, 3)
    three = checked(lambda a, b, x: F.conv3d(torch.cat([a, b, x], 2), weight), video(1), video(1), video())
    channels = checked(lambda x: F.conv3d(double(x), wide), video())
    read = checked(lambda c, x: (y := torch.cat([c, x], 2), F.conv3d(y, weight)), video(2), video())
    assert three.steps == channels.steps == ["cat", "conv"]
    assert "frames" not in read.steps


# ---- norms and kept frames


@pytest.mark.parametrize("norm", [group_norm, channel_norm])
def test_a_norm_goes_into_the_frames(weight, norm):
    plan = checked(lambda x: F.conv3d(F.pad(norm(x), CAUSAL), weight), video())
    assert plan.steps == ["frames", "conv"]
    (found,) = frames_of(plan)
    assert found["norm"].activation == "silu"
    assert found["keep"] == 0


@pytest.mark.parametrize("norm", [group_norm, channel_norm])
def test_kept_frames_are_the_second_result(weight, norm):
    def call(x):
        x = norm(x)
        return F.conv3d(F.pad(x, CAUSAL), weight), x[:, :, -2:].clone(), x[:, :, -1:] + 1

    plan = checked(call, video())
    assert plan.steps.count("frames") == 1
    assert not {"copy", "group_norm", "channel_norm"} & set(plan.steps)
    assert frames_of(plan)[0]["keep"] == 2


@pytest.mark.parametrize("norm", [group_norm, channel_norm])
@pytest.mark.parametrize(("size", "steps_of_chunks"), [(3, 2), (2, 3), (1, 5)])
def test_chunks_with_caches(weight, norm, size, steps_of_chunks):
    """The cache of a short chunk has a frame of the chunk before.

    With one frame a chunk, the first is convolved as an image, and the second keeps all that it reads.
    """

    def call(x):
        cache, results = None, []
        for start in range(0, x.shape[2], size):
            chunk = norm(x[:, :, start : start + size])
            kept = chunk[:, :, -2:].clone()
            if kept.shape[2] < 2 and cache is not None:
                kept = torch.cat([cache[:, :, -1:].clone(), kept], 2)
            front = 2 if cache is None else 2 - cache.shape[2]
            padded = chunk if cache is None else torch.cat([cache, chunk], 2)
            results.append(F.conv3d(F.pad(padded, (1, 1, 1, 1, front, 0)), weight))
            cache = kept
        return torch.cat(results, 2)

    found = steps_of(call, video(6))
    assert found[-2 * steps_of_chunks - 1 :] == ["frames", "conv"] * steps_of_chunks + ["cat"]
    first = [norm.__name__, "conv_last_slice"] if size == 1 else []
    assert found[: -2 * steps_of_chunks - 1] == first


@pytest.mark.parametrize("norm", [group_norm, channel_norm])
def test_a_result_is_all_that_is_kept(weight, norm):
    def call(cache, x):
        x = norm(x)
        return F.conv3d(torch.cat([cache, x], 2), weight), x

    def with_zeros(cache, x):
        whole = torch.cat([cache, norm(x)], 2)
        return F.conv3d(torch.cat([torch.zeros_like(cache), whole], 2), weight), whole

    assert kept_steps(call, video(2), video(3)) == (["frames", "conv"], [3])
    assert kept_steps(with_zeros, video(1), video(2)) == (["frames", "conv"], [3])


def test_a_result_with_pads_after_it_stays(weight):
    def call(x):
        x = group_norm(x)
        return F.conv3d(F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"), weight), x

    assert kept_steps(call, video()) == (["group_norm", "frames", "conv"], [0])


@pytest.mark.parametrize("norm", [group_norm, channel_norm])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 2, 1), (2, 1, 3), (1, 1)])
def test_chunks_that_carry_borders(weight, norm, sizes):
    """The cache has the borders of its frames."""

    def call(*chunks):
        cache, results = None, []
        for chunk in chunks:
            x = F.pad(norm(chunk), (1, 1, 1, 1, 2 if cache is None else 0, 0), mode="replicate")
            x = x if cache is None else torch.cat([cache, x], 2)
            cache = x[:, :, -2:].clone()
            results.append(F.conv3d(x, weight))
        return torch.cat(results, 2)

    plan = checked(call, *(video(size) for size in sizes))
    assert plan.steps == ["frames", "conv"] * len(sizes) + ["cat"]
    assert {(f["border"], f["mode"]) for f in frames_of(plan)} == {((1, 1), "replicate")}


def test_a_norm_that_is_read_otherwise_stays(weight):
    for other in (
        lambda h: h[:, :, :2],
        lambda h: h[:, :, 1:3],
        lambda h: h[:, :2],
        F.relu,
        lambda h: F.conv3d(h, weight),
        lambda h: torch.cat([h, h[:, :, -1:]], 2),
    ):
        plan = checked(
            lambda x, other=other: (h := group_norm(x), other(h), F.conv3d(F.pad(h, CAUSAL), weight)), video()
        )
        assert "group_norm" in plan.steps
        assert frames_of(plan)[0]["norm"] is None


def test_kept_frames_of_padded_ends_stay(weight):
    """The last frames with pads after them are not the last frames that upstream keeps."""

    def call(x):
        h = group_norm(x)
        return F.conv3d(F.pad(h, (1, 1, 1, 1, 1, 1), mode="replicate"), weight), h[:, :, -2:]

    assert "group_norm" in steps_of(call, video())


def test_a_cache_that_needs_the_kept_frames_stays(weight):
    """Else the step would read what it computes."""

    def call(x):
        h = group_norm(x)
        return F.conv3d(torch.cat([torch.tanh(h[:, :, -2:]), h], 2), weight), h[:, :, -1:]

    def whole(x):
        h = group_norm(x)
        return F.conv3d(torch.cat([h, h], 2), weight)

    assert "group_norm" in steps_of(call, video())
    assert "group_norm" in steps_of(whole, video())


def test_a_cache_with_other_frames_than_the_last_stays(weight):
    def call(cache, x):
        h = group_norm(x)
        y = F.conv3d(F.pad(torch.cat([cache, h], 2), (1, 1, 1, 1, 0, 0)), weight)
        return y, torch.cat([cache[:, :, :1], h], 2)

    assert "group_norm" in steps_of(call, video(2), video(1))


def test_a_norm_of_each_frame(weight):
    def call(x):
        images = group_norm(x.transpose(1, 2).flatten(0, 1))
        h = images.unflatten(0, (2, -1)).transpose(1, 2)
        return F.conv3d(F.pad(h, CAUSAL, mode="replicate"), weight)

    plan = checked(call, video())
    assert plan.steps == ["frames", "conv"]
    assert frames_of(plan)[0]["norm"].framewise


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, w: F.conv3d(x, w[:, :, -1:], padding=(0, 1, 1)), ["conv_last_slice"]),
        (lambda x, w: F.conv3d(x, w[:, :, -1:], stride=(2, 1, 2)), ["conv_last_slice"]),
        (lambda x, w: F.conv3d(x, w[:, :, 1:2], padding=(0, 1, 1)), ["conv"]),
        (lambda x, w: F.conv3d(x, w[:, :, -1:], padding=1), ["conv"]),
    ],
)
def test_code_that_leaves_out_zeros(weight, call, expected):
    assert steps_of(lambda x: call(x, weight), video(1)) == expected


def test_other_slices_of_a_weight_stay(weight):
    assert steps_of(lambda x: F.conv3d(x, weight[:, :, -1:]), video(2)) == ["conv"]
    assert steps_of(lambda x: F.conv3d(x, weight[:, :, :, -1:]), video(3)) == ["conv"]
    assert steps_of(lambda x: F.conv3d(x, weight[:, :, -2:]), video(2)) == ["conv"]


# ---- kept frames of what the convolution reads


def kept_steps(call, *inputs):
    """(names of steps, number of kept frames of each ``steps.frames``)"""
    plan = checked(call, *inputs)
    return plan.steps, [f["keep"] for f in frames_of(plan)]


def test_the_last_padded_frames(weight):
    """A chunk of one frame: the frame before the last is a pad."""

    def call(x):
        w = F.pad(group_norm(x), (0, 0, 0, 0, 2, 0), mode="replicate")
        return F.conv3d(w, weight, padding=(0, 1, 1)), w[:, :, -2:].clone()

    assert kept_steps(call, video(1)) == (["frames", "conv"], [2])


def test_the_last_frames_of_a_cache_and_a_chunk(weight):
    def call(cache, x):
        w = torch.cat([cache, group_norm(x)], 2)
        return F.conv3d(F.pad(w, (1, 1, 1, 1)), weight), w[:, :, -2:].clone(), w[:, :, -1:] * 2

    found, keep = kept_steps(call, video(2), video(1))
    assert (found, keep) == (["frames", "conv", "aten.mul"], [2])


def test_all_that_is_read_is_the_next_cache(weight):
    def call(cache, x, y):
        w = torch.cat([cache, group_norm(x)], 2)
        return F.conv3d(w, weight), F.conv3d(torch.cat([w, group_norm(y)], 2), weight)

    assert kept_steps(call, video(2), video(1), video(1)) == (["frames", "conv"] * 2, [3, 0])


def test_other_parts_of_what_is_read_stay(weight):
    for other in (
        lambda w: w[:, :, :2],
        lambda w: w[:, :, 1:3],
        lambda w: w[..., 1:],
        F.relu,
        lambda w: F.conv3d(w, weight, stride=2),
    ):

        def call(cache, x, other=other):
            w = torch.cat([cache, group_norm(x)], 2)
            return F.conv3d(w, weight), other(w)

        found, keep = kept_steps(call, video(2), video(2))
        assert ("group_norm" in found, "cat" in found, sum(keep)) == (True, True, 0)


def test_kept_frames_with_borders_stay(weight):
    def outside(x):
        w = F.pad(repeated(x, 2), (1, 1, 1, 1, 0, 0), mode="replicate")
        return F.conv3d(w, weight), w[:, :, -2:]

    def inside(x):
        w = repeated(F.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate"), 2)
        return F.conv3d(w, weight), w[:, :, -2:]

    def below(x):
        w = F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect")
        return F.conv3d(repeated(w, 2), weight), w[:, :, -2:]

    for call in (outside, inside, below):
        found, keep = kept_steps(call, video())
        assert ("pad" in found, sum(keep)) == (True, 0)


def test_kept_frames_below_pads_behind_stay(weight):
    def call(cache, x):
        w = torch.cat([cache, x], 2)
        return F.conv3d(F.pad(w, (0, 0, 0, 0, 0, 1), mode="replicate"), weight), w[:, :, -2:]

    found, keep = kept_steps(call, video(2), video(2))
    assert ("cat" in found, keep) == (True, [0])


def test_kept_frames_of_upsampled_frames(weight):
    def call(x):
        w = F.pad(first_once(channel_norm(x)), (0, 0, 0, 0, 2, 0), mode="replicate")
        return F.conv3d(w, weight), w[:, :, -2:]

    assert kept_steps(call, video(3)) == (["frames", "conv"], [2])


# ---- padded frames that others read without pads


def residual_of(before, pad, weight):
    """A convolution of padded frames, plus the frames themselves."""

    def call(x):
        x = before(x)
        return F.conv3d(F.pad(x, pad, mode="replicate"), weight) + x

    return call


@pytest.mark.parametrize("front", [2, 1])
@pytest.mark.parametrize("before", [lambda x: first_once(x), lambda x: first_once(channel_norm(x))])
def test_others_read_a_part_of_the_padded_frames(before, front, weight):
    call = residual_of(before, (0, 0, 0, 0, front, 2 - front), weight[..., :1, :1])
    plan = checked(call, video()[:1])
    assert [name for name in plan.steps if name != "aten.add"] == ["frames", "conv"]
    assert frames_of(plan)[0]["front"] == front


@pytest.mark.parametrize(
    ("pad", "samples"), [((1, 1, 1, 1, 2, 0), 1), ((0, 0, 0, 0, 2, 0), 2)], ids=["borders", "two videos"]
)
def test_other_padded_frames_are_apart(pad, samples, weight):
    weight = weight if pad[0] else weight[..., :1, :1]
    plan = checked(residual_of(lambda x: first_once(x), pad, weight), video()[:samples])
    assert plan.steps.count("frames") == 2


# ---- pads before a norm


GROWING = torch.arange(1.0, 9.0)[:, None, None]


def padded_norm(x, front=1, back=1):
    """Frames that differ, so that it matters which of them count twice."""
    return group_norm(repeated(x * GROWING[: x.shape[2]], front, back))


@pytest.mark.parametrize("pads", [(1, 1), (2, 0), (0, 3)])
def test_pads_before_a_norm_count_in_it(weight, pads):
    b = torch.randn(4)
    plan = checked(lambda x: F.conv3d(padded_norm(F.conv3d(x, weight, b), *pads), weight), video(6))
    assert plan.steps == ["conv", "add_bias_", "aten.mul", "frames", "conv"]
    found = frames_of(plan)[0]
    assert (found["front"], found["back"], found["mode"], found["norm"].pads_first) == (
        *pads,
        "replicate",
        True,
    )
    shifted = checked(
        lambda x: F.conv3d(group_norm(repeated(F.conv3d(x, weight, b), *pads)), weight), video(6)
    )
    assert shifted.steps == ["conv", "frames", "conv"]
    assert frames_of(shifted)[0]["shift"].op == "placeholder"


@pytest.mark.parametrize(("size", "chunks"), [((4, 8), 1), ((4, 8), 2), ((5, 7), 3)])
def test_kernels_compute_norms_of_padded_frames(weight, size, chunks, monkeypatch):
    """Also if the chunks of the statistics of a frame differ in size."""
    b = torch.randn(4)
    of = functools.partial(reference_channel_statistics, chunks=chunks)
    monkeypatch.setattr("sdfastgn.plans.run.steps.statistics_op.channel_statistics", of)

    def call(x):
        y = F.conv3d(x, weight, b, padding=1)
        return F.conv3d(padded_norm(y), weight), F.conv3d(group_norm(repeated(y, 2, 1)), weight)

    with kernels(direct=True):
        plan = checked(call, torch.randn(2, 4, 3, *size))
    assert [f["norm"].pads_first for f in frames_of(plan)] == [True, True]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: group_norm(F.pad(x, CAUSAL)),
        lambda x: group_norm(F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate")),
        lambda x: group_norm(F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect")),
        lambda x: channel_norm(repeated(x, 1)) + 1,
        lambda x: (y := repeated(x, 1), group_norm(y) + y)[1],
        lambda x: (y := group_norm(repeated(x, 1)), y + y.mean())[1],
        lambda x: (
            group_norm(repeated(x, 1).transpose(1, 2).flatten(0, 1)).unflatten(0, (2, -1)).transpose(1, 2)
        ),
    ],
)
def test_other_pads_before_a_norm_stay(weight, read):
    plan = checked(lambda x: F.conv3d(read(x), weight), video(5))
    assert "pad" in plan.steps
    assert not any(f["norm"] and f["norm"].pads_first for f in frames_of(plan))


def test_pads_on_both_sides_of_a_norm(weight):
    plan = checked(lambda x: F.conv3d(repeated(padded_norm(x), 1, 1), weight), video())
    assert plan.steps == ["aten.mul", "pad", "frames", "conv"]
    assert frames_of(plan)[0]["norm"].pads_first is False


# ---- upsampling


def first_once(x, t=2):
    first = F.interpolate(x[:, :, 0], scale_factor=2.0, mode="nearest").unsqueeze(2)
    return torch.cat(
        [first, F.interpolate(x[:, :, 1:], scale_factor=(float(t), 2.0, 2.0), mode="nearest")], 2
    )


def test_upsampling_with_the_first_frame_once(weight):
    plan = checked(lambda x: F.conv3d(F.pad(first_once(x), CAUSAL, mode="replicate"), weight), video(3))
    assert plan.steps == ["frames", "conv"]
    assert frames_of(plan)[0]["times"] == (2, 2, 2)


def test_upsampling_of_each_frame(weight):
    def call(x):
        return F.conv3d(F.pad(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest"), CAUSAL), weight)

    plan = checked(call, video(3))
    assert plan.steps == ["frames", "conv"]
    assert frames_of(plan)[0]["times"] == (1, 2, 2)


def larger(x, t=2.0, size=2.0):
    return F.interpolate(x, scale_factor=(t, size, size))


def test_upsampling_of_all_frames(weight):
    """The step repeats the first frame once more by a pad."""
    plan = checked(lambda x: F.conv3d(repeated(larger(x), 2), weight, padding=1), video(3))
    plain = checked(lambda x: F.conv3d(larger(x, 4.0), weight), video(3))
    assert plan.steps == plain.steps == ["frames", "conv"]
    found = [(f["front"], f["mode"], f["times"]) for f in (*frames_of(plan), *frames_of(plain))]
    assert found == [(3, "replicate", (2, 2, 2)), (3, "replicate", (4, 2, 2))]


def test_upsampling_after_a_cache(weight):
    def call(cache, x):
        w = torch.cat([cache, larger(group_norm(x), 1.0)], 2)
        return F.conv3d(w, weight, padding=(0, 1, 1)), w[:, :, -2:].clone()

    plan = checked(call, larger(video(2), 1.0), video(2))
    assert plan.steps == ["frames", "conv"]
    (found,) = frames_of(plan)
    assert (found["cache"].op, found["front"], found["keep"], found["times"]) == (
        "placeholder",
        2,
        2,
        (1, 2, 2),
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda x: F.pad(larger(x), CAUSAL),  # zeros before the copies of the first frame
        lambda x: torch.cat([torch.tanh(larger(x[:, :, :1])), larger(x)], 2),  # a cache before them
        lambda x: F.pad(larger(x), (1, 1, 1, 1)),
        lambda x: torch.cat([(y := larger(x)), y[:, :1].expand_as(y)], 2),
    ],
)
def test_other_upsampling_is_a_step_of_its_own(weight, read):
    plan = checked(lambda x: F.conv3d(read(x), weight), video(3))
    assert plan.steps.count("upsample") == 0
    assert [f["times"] for f in frames_of(plan)].count((2, 2, 2)) >= 1
    assert frames_of(plan)[-1]["cache"] is None or frames_of(plan)[-1]["times"] == (1, 1, 1)


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0), (4.0, 2.0)])
def test_a_norm_or_a_bias_before_upsampling(weight, times):
    b = torch.randn(4)
    normed = checked(lambda x: larger(group_norm(x), *times) * 2, video(3))
    biased = checked(lambda x: larger(F.conv3d(x, weight, b), *times) * 2, video(5))
    assert (normed.steps, biased.steps) == (["frames", "aten.mul"], ["conv", "frames", "aten.mul"])
    assert frames_of(normed)[0]["norm"] is not None
    assert frames_of(biased)[0]["shift"].op == "placeholder"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_upsampling_in_other_dtypes(dtype):
    expected = {torch.float64: ["upsample"], torch.float16: ["frames"]}[dtype]
    assert steps_of(larger, video(3).to(dtype)) == expected


def test_norms_before_upsampling(weight):
    def call(norm, keeps, x):
        h = norm(x)
        y = F.conv3d(F.pad(first_once(h), CAUSAL, mode="replicate"), weight)
        return (y, h[:, :, -1:]) if keeps else y

    for norm in (group_norm, channel_norm):
        plan = checked(lambda x, norm=norm: call(norm, False, x), video(3))
        assert plan.steps == ["frames", "conv"]
        # The kept frames of the step are upsampled, upstream's are not.
        kept = checked(lambda x, norm=norm: call(norm, True, x), video(3))
        assert frames_of(kept)[0]["norm"] is None


# ---- windows and single frames


@pytest.fixture
def windows(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "sdfastgn.plans.rewrite.frames.windows_pay", lambda *sizes: bool(asked.append(sizes)) or True
    )
    return asked


def test_frames_side_by_side(weight, windows):
    b = torch.randn(4)
    plan = checked(lambda x: F.conv3d(F.pad(group_norm(x), CAUSAL), weight, b), video())
    assert plan.steps == ["frames", "conv_windows", "add_bias_"]
    assert frames_of(plan)[0]["window"] == 3
    assert windows == [(torch.device("cpu"), torch.float32, (4, 4, 3, 3, 3), 1, 1, 1)]


@pytest.mark.usefixtures("windows")
def test_windows_of_all_pads(weight):
    replicate = checked(lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"), weight), video())
    cached = checked(
        lambda c, x: F.conv3d(torch.cat([c, group_norm(x)], 2), weight, stride=(1, 2, 1), padding=(0, 1, 2)),
        video(2),
        video(2),
    )
    assert replicate.steps == cached.steps == ["frames", "conv_windows"]


@pytest.mark.usefixtures("windows")
def test_frames_that_the_convolution_pads_are_no_windows(weight):
    plan = checked(lambda x: F.conv3d(F.pad(x, CAUSAL), weight, padding=(1, 0, 0)), video())
    assert plan.steps == ["frames", "conv"]


def test_one_frame_after_zeros_is_an_image(weight):
    b = torch.randn(4)
    plan = checked(lambda x: F.conv3d(F.pad(group_norm(x), CAUSAL), weight, b), video(1))
    dilated = checked(lambda x: F.conv3d(F.pad(x, (1, 1, 0, 0, 4, 0)), weight, dilation=(2, 1, 1)), video(1))
    assert plan.steps == ["group_norm", "conv_last_slice", "add_bias_"]
    assert dilated.steps == ["conv_last_slice"]


def test_other_single_frames_are_not(weight):
    for call, T in (
        (lambda x: F.conv3d(F.pad(x, CAUSAL, mode="replicate"), weight), 1),
        (lambda x: F.conv3d(F.pad(x, CAUSAL, value=1.0), weight), 1),
        (lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1, 3, 0)), weight), 1),
        (lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1, 0, 2)), weight), 1),
        (lambda x: F.conv3d(F.pad(x, CAUSAL), weight, padding=(1, 0, 0)), 1),
        (lambda x: F.conv3d(F.pad(x, CAUSAL), weight), 2),
    ):
        assert "conv_last_slice" not in steps_of(call, video(T))


# ---- parts of a video, and images


def in_parts(x, starts, length, weight, **options):
    return torch.cat([F.conv3d(x[:, :, s : s + length], weight, **options) for s in starts], 2)


def test_parts_of_a_video_are_convolved_together(weight):
    b = torch.randn(4)
    for starts, length, options in (
        ((0, 1, 2, 3), 3, {"bias": b, "padding": (0, 1, 1)}),
        ((1, 3), 4, {"bias": b}),
        ((0, 2, 4), 3, {"stride": (2, 1, 1)}),
        ((0, 1), 5, {"dilation": (2, 1, 1)}),
    ):
        plan = checked(lambda x, a=(starts, length), o=options: in_parts(x, *a, weight, **o), video(7))
        assert plan.steps[0] == "conv"
        assert plan.steps[1:] == ["add_bias_"] * ("bias" in options)


def test_parts_of_what_is_padded_and_kept(weight):
    """A long convolution in parts, after a cache."""

    def call(cache, x):
        w = torch.cat([cache, group_norm(x)], 2)
        return in_parts(w, range(3), 3, weight, padding=(0, 1, 1)), w[:, :, -2:].clone()

    assert kept_steps(call, video(2), video(3)) == (["frames", "conv"], [2])


def test_other_parts_are_convolved_apart(weight):
    other = torch.randn(4, 4, 3, 3, 3)
    for call in (
        lambda x: in_parts(x, (0, 2), 3, weight),
        lambda x: in_parts(x, (1, 0), 3, weight),
        lambda x: in_parts(x, (0, 3), 4, weight),
        lambda x: in_parts(x, (0, 2), 2, weight, padding=1),
        lambda x: in_parts(x, (0, 1), 3, weight, stride=(2, 1, 1)),
        lambda x: torch.cat([F.conv3d(x[:, :, :3], weight), F.conv3d(x[:, :, 1:4], other)], 2),
        lambda x: torch.cat([F.conv3d(x[:, :, :3], weight), F.conv3d((x + 1)[:, :, 1:4], weight)], 2),
        lambda x: torch.cat([F.conv3d(x[:, :, :3], weight), F.conv3d(x[:, :, 1:4], weight)], 1),
        lambda x: torch.cat([F.conv3d(x[:, :, :, :4], weight), F.conv3d(x[:, :, :, 1:], weight)], 2),
    ):
        assert steps_of(call, video(7)).count("conv") == 2


def test_a_part_that_is_read_elsewhere(weight):
    def call(x):
        first = F.conv3d(x[:, :, :3], weight)
        return torch.cat([first, F.conv3d(x[:, :, 1:4], weight)], 2), first

    assert steps_of(call, video()) == ["conv", "conv", "cat"]


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
@pytest.mark.parametrize("norm", [group_norm, channel_norm, lambda x: x])
def test_a_padded_image_is_one_frame(mode, norm):
    w, v, b = torch.randn(4, 4, 3, 3), torch.randn(4, 4, 1, 1), torch.randn(4)

    def call(x):
        return F.conv2d(F.pad(norm(F.conv2d(x, v, b)), (1, 1, 2, 2), mode=mode), w)

    plan = checked(call, torch.randn(2, 4, 5, 6))
    assert plan.steps == ["conv", "frames", "conv"]
    (found,) = frames_of(plan)
    assert (found["border"], found["mode"]) == ((2, 1), mode)
    assert found["shift"] is not None


def test_other_padded_images():
    w = torch.randn(4, 4, 3, 3)
    pads = {"mode": "replicate"}
    for call, expected in (
        (lambda x: F.conv2d(F.pad(x, (1, 0, 1, 1), **pads), w), ["pad", "conv"]),
        (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), w), ["pad", "conv"]),
        (lambda x: (y := F.pad(x, (1, 1, 1, 1), **pads), F.conv2d(y, w))[::-1], ["pad", "conv"]),
        (
            lambda x: (y := group_norm(x), F.conv2d(F.pad(y, (1, 1, 1, 1), **pads), w)),
            ["group_norm", "frames", "conv"],
        ),
    ):
        assert steps_of(call, torch.randn(2, 4, 5, 6)) == expected
