# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of `norms`: tensors lie as rows (voxels) of channels; a tile is BLOCK rows.

A program's tiles follow each other; sums are written per program and added in a fixed order, so that runs repeat to the
bit. A row is taken as BG groups of BS channels, powers of two, of which G groups of GS channels are there.
"""

import triton
import triton.language as tl


@triton.jit
def _channels(C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr):
    """Return channel, group and presence of each place in a row."""
    place = tl.arange(0, BG * BS)
    if GS == BS:
        return place, place // GS, place < C
    channel = place // BS * GS + place % BS
    return channel, place // BS, (place % BS < GS) & (channel < C)


@triton.jit
def _merge(seen, mean, squares, count, other, other_squares):
    """Return count, mean and squared deviations of two parts. Source: Chan et al., 1983."""
    total = seen + count
    share = count / tl.maximum(total, 1.0)
    step = other - mean
    return total, mean + step * share, squares + other_squares + step * step * seen * share


@triton.jit
def sums_kernel(
    x, partial, rows, tiles,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write mean and squared deviations [sample, program, 2, channel] of the program's rows of x [sample, row, C]."""
    channel, _, there = _channels(C, GS, BG, BS)
    sample, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * tiles * BLOCK
    x += (sample * rows + first) * C
    seen, mean, squares = 0.0, tl.zeros((BG * BS,), tl.float32), tl.zeros((BG * BS,), tl.float32)
    for tile in range(tiles):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        ok = (row[:, None] < rows - first) & there[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], mask=ok, other=0.0).to(tl.float32)
        count = tl.minimum(tl.maximum(rows - first - tile * BLOCK, 0), BLOCK).to(tl.float32)
        centre = tl.sum(value, 0) / tl.maximum(count, 1.0)
        off = tl.where(ok, value - centre[None, :], 0.0)
        seen, mean, squares = _merge(seen, mean, squares, count, centre, tl.sum(off * off, 0))
    partial += (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * BG * BS + tl.arange(0, BG * BS)
    tl.store(partial, mean)
    tl.store(partial + BG * BS, squares)


@triton.jit
def apply_kernel(
    x, partial, weight, bias, slope, residual, y, statistics, running_mean, running_var, steps_seen, shift,
    rows, tiles, parts, part_rows, epsilon, momentum,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    SLOPE: tl.constexpr, RESIDUAL: tl.constexpr, RUNNING: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Write the normalised, activated rows; the first program of a sample writes mean and 1 / deviation [2, group]."""
    channel, group, there = _channels(C, GS, BG, BS)
    place, sample = tl.arange(0, BG * BS), tl.program_id(1).to(tl.int64)
    partial += sample * parts * 2 * BG * BS
    seen, mean, squares = 0.0, tl.zeros((BG * BS,), tl.float32), tl.zeros((BG * BS,), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        counts = tl.minimum(tl.maximum(rows - part * part_rows, 0), part_rows).to(tl.float32)[:, None]
        at, here = partial + part[:, None] * 2 * BG * BS + place[None, :], (part < parts)[:, None]
        means = tl.load(at, mask=here, other=0.0)
        count = tl.sum(tl.sum(counts, 1), 0)
        centre = tl.sum(counts * means, 0) / tl.maximum(count, 1.0)
        off = means - centre[None, :]
        inner = tl.sum(tl.load(at + BG * BS, mask=here, other=0.0) + counts * off * off, 0)
        seen, mean, squares = _merge(seen, mean, squares, count, centre, inner)
    whole = tl.sum(tl.reshape(mean, (BG, BS)), 1)[:, None] / GS
    off = tl.where(there, mean - tl.reshape(tl.broadcast_to(whole, (BG, BS)), (BG * BS,)), 0.0)
    variances = tl.sum(tl.reshape(squares + off * off * rows, (BG, BS)), 1)[:, None] / GS / rows
    mean = tl.reshape(tl.broadcast_to(whole, (BG, BS)), (BG * BS,))
    variance = tl.reshape(tl.broadcast_to(variances, (BG, BS)), (BG * BS,))
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    if tl.program_id(0) == 0:
        first_of_group = there & (channel % GS == 0)
        tl.store(statistics + sample * 2 * (C // GS) + group, mean, mask=first_of_group)
        tl.store(statistics + (sample * 2 + 1) * (C // GS) + group, inverse, mask=first_of_group)
        if RUNNING:
            moved = mean
            if SHIFT:
                moved += tl.load(shift + channel, mask=there, other=0.0)
            before = tl.load(running_mean + channel, mask=there)
            tl.store(running_mean + channel, before + momentum * (moved - before), mask=there)
            before = tl.load(running_var + channel, mask=there)
            unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
            tl.store(running_var + channel, before + momentum * (unbiased - before), mask=there)
            tl.store(steps_seen, tl.load(steps_seen) + 1)
    scale = inverse * tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    first = tl.program_id(0) * tiles * BLOCK
    start = (sample * rows + first) * C
    for tile in range(tiles):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        ok, at = (row[:, None] < rows - first) & there[None, :], row[:, None] * C + channel[None, :]
        value = tl.load(x + start + at, mask=ok, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + offset[None, :]
        if SLOPE:
            value = tl.where(value < 0, value * tl.load(slope).to(tl.float32), value)
        else:
            value = tl.where(value < 0, 0.0, value)
        if RESIDUAL:
            value += tl.load(residual + start + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(y + start + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def gradient_sums_kernel(
    gradient, x, statistics, weight, bias, slope, partial, rows, tiles,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Write the sums [sample, program, 3, channel] of the gradient, of it times the normal value, of the slope's."""
    channel, group, there = _channels(C, GS, BG, BS)
    sample, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * tiles * BLOCK
    mean = tl.load(statistics + sample * 2 * (C // GS) + group, mask=there, other=0.0)
    inverse = tl.load(statistics + (sample * 2 + 1) * (C // GS) + group, mask=there, other=0.0)
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    straight, leaning = tl.zeros((BG * BS,), tl.float32), tl.zeros((BG * BS,), tl.float32)
    sloping = tl.zeros((BG * BS,), tl.float32)
    start = (sample * rows + first) * C
    for tile in range(tiles):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        ok, at = (row[:, None] < rows - first) & there[None, :], row[:, None] * C + channel[None, :]
        given = tl.load(gradient + start + at, mask=ok, other=0.0).to(tl.float32)
        normal = (tl.load(x + start + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        value = normal * scale[None, :] + offset[None, :]
        if SLOPE:
            sloping += tl.sum(tl.where(value < 0, given * value, 0.0), 0)
            given = tl.where(value > 0, given, given * tl.load(slope).to(tl.float32))
        else:
            given = tl.where(value > 0, given, 0.0)
        straight += tl.sum(given, 0)
        leaning += tl.sum(given * normal, 0)
    partial += (sample * tl.num_programs(0) + tl.program_id(0)) * 3 * BG * BS + tl.arange(0, BG * BS)
    tl.store(partial, straight)
    tl.store(partial + BG * BS, leaning)
    tl.store(partial + 2 * BG * BS, sloping)


@triton.jit
def _added(partial, parts, width: tl.constexpr, PARTS: tl.constexpr):
    """Return the three sums of `gradient_sums_kernel` over all programs of a sample."""
    place = tl.arange(0, width)
    straight, leaning = tl.zeros((width,), tl.float32), tl.zeros((width,), tl.float32)
    sloping = tl.zeros((width,), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        at, here = partial + part[:, None] * 3 * width + place[None, :], (part < parts)[:, None]
        straight += tl.sum(tl.load(at, mask=here, other=0.0), 0)
        leaning += tl.sum(tl.load(at + width, mask=here, other=0.0), 0)
        sloping += tl.sum(tl.load(at + 2 * width, mask=here, other=0.0), 0)
    return straight, leaning, sloping


@triton.jit
def gradient_kernel(
    gradient, x, statistics, weight, bias, slope, partial, beside, dx, dweight, dbias, dslope, rows, tiles, parts,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    SLOPE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x; the very first program also those of weight, bias and slope, over all samples."""
    channel, group, there = _channels(C, GS, BG, BS)
    sample = tl.program_id(1).to(tl.int64)
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        straight, leaning = tl.zeros((BG * BS,), tl.float32), tl.zeros((BG * BS,), tl.float32)
        sloping = tl.zeros((BG * BS,), tl.float32)
        of_sample = partial
        for _ in range(tl.num_programs(1)):
            one, two, three = _added(of_sample, parts, BG * BS, PARTS)
            of_sample += parts * 3 * BG * BS
            straight += one
            leaning += two
            sloping += three
        tl.store(dweight + channel, leaning, mask=there)
        tl.store(dbias + channel, straight, mask=there)
        tl.store(dslope, tl.sum(sloping, 0))
    straight, leaning, _ = _added(partial + sample * parts * 3 * BG * BS, parts, BG * BS, PARTS)
    by_group = tl.sum(tl.reshape(straight * scale, (BG, BS)), 1)[:, None] / GS / rows
    level = tl.reshape(tl.broadcast_to(by_group, (BG, BS)), (BG * BS,))
    by_group = tl.sum(tl.reshape(leaning * scale, (BG, BS)), 1)[:, None] / GS / rows
    tilt = tl.reshape(tl.broadcast_to(by_group, (BG, BS)), (BG * BS,))
    mean = tl.load(statistics + sample * 2 * (C // GS) + group, mask=there, other=0.0)
    inverse = tl.load(statistics + (sample * 2 + 1) * (C // GS) + group, mask=there, other=0.0)
    first = tl.program_id(0) * tiles * BLOCK
    start = (sample * rows + first) * C
    for tile in range(tiles):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        ok, at = (row[:, None] < rows - first) & there[None, :], row[:, None] * C + channel[None, :]
        given = tl.load(gradient + start + at, mask=ok, other=0.0).to(tl.float32)
        normal = (tl.load(x + start + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        value = normal * scale[None, :] + offset[None, :]
        if SLOPE:
            given = tl.where(value > 0, given, given * tl.load(slope).to(tl.float32))
        else:
            given = tl.where(value > 0, given, 0.0)
        found = (given * scale[None, :] - level[None, :] - normal * tilt[None, :]) * inverse[None, :]
        if BESIDE:
            found += tl.load(beside + start + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(dx + start + at, found.to(dx.dtype.element_ty), mask=ok)
