# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of `norms`: tensors lie as rows (voxels) of channels; a tile is BLOCK rows.

Sums are kept for each place of a tile until its program ends (to add up a tile costs more than to read it), written per
program and added in a fixed order, so that runs repeat to the bit. STAGES tiles are read ahead. A row is taken as BG
groups of BS channels, powers of two, of which G groups of GS channels are there.
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
def _by_group(values, BG: tl.constexpr, BS: tl.constexpr):
    """Return of each channel the sum over its group."""
    sums = tl.sum(tl.reshape(values, (BG, BS)), 1)[:, None]
    return tl.reshape(tl.broadcast_to(sums, (BG, BS)), (BG * BS,))


@triton.jit
def _load(rows, start, row, channel, ok, STEP: tl.constexpr):
    """Return a tile of what has STEP elements from a row to the next."""
    return tl.load(rows + start * STEP + row * STEP + channel[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def sums_kernel(
    x, partial, rows, tiles,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write mean and squared deviations [sample, program, 2, channel] of the program's rows of x [sample, row, C].

    Sums are of what is left without the mean of the first tile, so that a large mean costs no digits.
    """
    channel, _, there = _channels(C, GS, BG, BS)
    sample, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * tiles * BLOCK
    start, left, place = sample * rows + first, rows - first, tl.arange(0, BLOCK)[:, None]
    centre = tl.sum(_load(x, start, place, channel, (place < left) & there[None, :], ROW), 0) / tl.minimum(left, BLOCK)
    total, squares = tl.zeros((BLOCK, BG * BS), tl.float32), tl.zeros((BLOCK, BG * BS), tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        row = tile * BLOCK + place
        ok = (row < left) & there[None, :]
        off = tl.where(ok, _load(x, start, row, channel, ok, ROW) - centre[None, :], 0.0)
        total += off
        squares += off * off
    sums = tl.sum(total, 0)
    mean = sums / tl.minimum(left, tiles * BLOCK)
    partial += (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * BG * BS + tl.arange(0, BG * BS)
    tl.store(partial, centre + mean)
    tl.store(partial + BG * BS, tl.sum(squares, 0) - mean * sums)


@triton.jit
def _statistics(
    partial, rows, parts, part_rows, there,
    GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return mean and variance of each channel's group, from what `sums_kernel` wrote of a sample.

    Source: Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    place, number = tl.arange(0, BG * BS)[None, :], tl.arange(0, PARTS)[:, None]
    total, squares = tl.zeros((PARTS, BG * BS), tl.float32), tl.zeros((PARTS, BG * BS), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + number
        count = tl.minimum(tl.maximum(rows - part * part_rows, 0), part_rows).to(tl.float32)
        total += count * tl.load(partial + part * 2 * BG * BS + place, mask=part < parts, other=0.0)
    whole = _by_group(tl.sum(total, 0) / rows, BG, BS) / GS
    for begin in range(0, parts, PARTS):
        part = begin + number
        at, here = partial + part * 2 * BG * BS + place, (part < parts) & there[None, :]
        count = tl.minimum(tl.maximum(rows - part * part_rows, 0), part_rows).to(tl.float32)
        off = tl.load(at, mask=here, other=0.0) - whole[None, :]
        squares += tl.where(here, tl.load(at + BG * BS, mask=here, other=0.0) + count * off * off, 0.0)
    return whole, _by_group(tl.sum(squares, 0), BG, BS) / GS / rows


@triton.jit
def apply_kernel(
    x, partial, weight, bias, slope, residual, residual_bias, y, statistics, running_mean, running_var, steps_seen,
    shift, rows, tiles, parts, part_rows, epsilon, momentum,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the normalised, activated rows; the first program of a sample writes mean and 1 / deviation [2, group].

    ROW is from a row of x to the next, RESIDUAL from one of the residual, or 0 where there is none.
    """
    channel, group, there = _channels(C, GS, BG, BS)
    sample = tl.program_id(1).to(tl.int64)
    partial += sample * parts * 2 * BG * BS
    mean, variance = _statistics(partial, rows, parts, part_rows, there, GS, BG, BS, PARTS)
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    if tl.program_id(0) == 0:
        first_of_group = there & (channel % GS == 0)
        tl.store(statistics + sample * 2 * (C // GS) + group, mean, mask=first_of_group)
        tl.store(statistics + (sample * 2 + 1) * (C // GS) + group, inverse, mask=first_of_group)
        if running_mean is not None:
            level = mean if shift is None else mean + tl.load(shift + channel, mask=there, other=0.0)
            unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
            before = tl.load(running_mean + channel, mask=there)
            spread = tl.load(running_var + channel, mask=there)
            tl.store(running_mean + channel, before + momentum * (level - before), mask=there)
            tl.store(running_var + channel, spread + momentum * (unbiased - spread), mask=there)
            tl.store(steps_seen, tl.load(steps_seen) + 1)
    scale = inverse * tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    first = tl.program_id(0) * tiles * BLOCK
    start = sample * rows + first
    leak = _leak(slope, KIND)
    for tile in tl.range(tiles, num_stages=STAGES):
        row = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        ok, at = (row < rows - first) & there[None, :], row * C + channel[None, :]
        value = _load(x, start, row, channel, ok, ROW)
        value = (value - mean[None, :]) * scale[None, :] + offset[None, :]
        if RESIDUAL:
            added = _load(residual, start, row, channel, ok, RESIDUAL)
            if residual_bias is not None:
                added += tl.load(residual_bias + channel, mask=there, other=0.0).to(tl.float32)[None, :]
        if KIND == "sum_relu":
            value += added
        if KIND == "prelu":
            value = tl.where(value < 0, value * leak, value)
        elif KIND != "none":
            value = tl.where(value < 0, 0.0, value)
        if RESIDUAL and KIND != "sum_relu":
            value += added
        tl.store(y + start * C + at, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _constants(statistics, weight, bias, sample, C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr):
    """Return mean, 1 / deviation, weight and bias of each channel in a row."""
    channel, group, there = _channels(C, GS, BG, BS)
    mean = tl.load(statistics + sample * 2 * (C // GS) + group, mask=there, other=0.0)
    inverse = tl.load(statistics + (sample * 2 + 1) * (C // GS) + group, mask=there, other=0.0)
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    return mean[None, :], inverse[None, :], scale[None, :], offset[None, :]


@triton.jit
def _leak(slope, KIND: tl.constexpr):
    """Return the slope of PReLU; it is read before a loop, in which it would be read ahead."""
    if KIND == "prelu":
        return tl.load(slope).to(tl.float32)
    return 0.0


@triton.jit
def _activation(given, value, leak, KIND: tl.constexpr):
    """Return the gradient before the activation of a value, from that behind it."""
    if KIND == "prelu":
        given = tl.where(value > 0, given, given * leak)
    elif KIND == "relu":
        given = tl.where(value > 0, given, 0.0)
    return given


@triton.jit
def gradient_sums_kernel(
    gradient, second, third, x, result, statistics, weight, bias, slope, partial, joined, rows, tiles,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
    KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write sums [sample, program, 4, channel] of the gradient, of it times the normal value, of the slope's.

    The fourth is of the gradient as it is given, behind the activation. The gradients given are added; `joined` is what
    they are together, before a sum's ReLU. From a row of one to the next it is FIRST, SECOND, THIRD, or 0 for none.
    """
    channel, _, there = _channels(C, GS, BG, BS)
    sample, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * tiles * BLOCK
    mean, inverse, scale, offset = _constants(statistics, weight, bias, sample, C, GS, BG, BS)
    straight, leaning = tl.zeros((BLOCK, BG * BS), tl.float32), tl.zeros((BLOCK, BG * BS), tl.float32)
    sloping, plain = tl.zeros((BLOCK, BG * BS), tl.float32), tl.zeros((BLOCK, BG * BS), tl.float32)
    start = sample * rows + first
    leak = _leak(slope, KIND)
    for tile in tl.range(tiles, num_stages=STAGES):
        row = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        ok, at = (row < rows - first) & there[None, :], row * C + channel[None, :]
        given = _load(gradient, start, row, channel, ok, FIRST)
        if SECOND:
            given += _load(second, start, row, channel, ok, SECOND)
        if THIRD:
            given += _load(third, start, row, channel, ok, THIRD)
        if KIND == "sum_relu":
            given = tl.where(tl.load(result + start * C + at, mask=ok, other=0.0) > 0, given, 0.0)
        if joined is not None:
            rounded = given.to(joined.dtype.element_ty)
            tl.store(joined + start * C + at, rounded, mask=ok)
            given = rounded.to(tl.float32)
        normal = (_load(x, start, row, channel, ok, ROW) - mean) * inverse
        value = normal * scale + offset
        if KIND == "prelu":  # with it alone the last two are asked for
            plain += given
            sloping += tl.where(value < 0, given * value, 0.0)
        given = _activation(given, value, leak, KIND)
        straight += given
        leaning += given * normal
    partial += (sample * tl.num_programs(0) + tl.program_id(0)) * 4 * BG * BS + tl.arange(0, BG * BS)
    tl.store(partial, tl.sum(straight, 0))
    tl.store(partial + BG * BS, tl.sum(leaning, 0))
    if KIND == "prelu":
        tl.store(partial + 2 * BG * BS, tl.sum(sloping, 0))
        tl.store(partial + 3 * BG * BS, tl.sum(plain, 0))


@triton.jit
def _added(partial, parts, width: tl.constexpr, PARTS: tl.constexpr):
    """Return one of the sums of `gradient_sums_kernel` over so many programs."""
    total = tl.zeros((PARTS, width), tl.float32)
    for begin in range(0, parts, PARTS):
        part = (begin + tl.arange(0, PARTS))[:, None]
        total += tl.load(partial + part * 4 * width + tl.arange(0, width)[None, :], mask=part < parts, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def gradient_kernel(
    gradient, x, statistics, weight, bias, slope, partial, beside, dx, dweight, dbias, dslope, dresidual_bias,
    rows, tiles, parts,
    C: tl.constexpr, GS: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, KIND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x; the very first program also those of what has no rows, over all samples."""
    channel, _, there = _channels(C, GS, BG, BS)
    sample = tl.program_id(1).to(tl.int64)
    width: tl.constexpr = BG * BS
    mean, inverse, scale, offset = _constants(statistics, weight, bias, sample, C, GS, BG, BS)
    own = partial + sample * parts * 4 * width
    straight, leaning = _added(own, parts, width, PARTS), _added(own + width, parts, width, PARTS)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        more, after = parts * (tl.num_programs(1) - 1), partial + parts * 4 * width  # of the samples behind this one
        tl.store(dbias + channel, straight + _added(after, more, width, PARTS), mask=there)
        tl.store(dweight + channel, leaning + _added(after + width, more, width, PARTS), mask=there)
        if KIND == "prelu":
            every = parts * tl.num_programs(1)
            tl.store(dslope, tl.sum(_added(partial + 2 * width, every, width, PARTS), 0))
            if dresidual_bias is not None:
                plain = _added(partial + 3 * width, every, width, PARTS)
                tl.store(dresidual_bias + channel, plain.to(dresidual_bias.dtype.element_ty), mask=there)
    scaled = tl.reshape(scale, (width,))
    level = _by_group(straight * scaled, BG, BS) / GS / rows
    tilt = _by_group(leaning * scaled, BG, BS) / GS / rows
    first = tl.program_id(0) * tiles * BLOCK
    start = sample * rows + first
    leak = _leak(slope, KIND)
    for tile in tl.range(tiles, num_stages=STAGES):
        row = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        ok, at = (row < rows - first) & there[None, :], row * C + channel[None, :]
        given = _load(gradient, start, row, channel, ok, C)
        normal = (_load(x, start, row, channel, ok, ROW) - mean) * inverse
        given = _activation(given, normal * scale + offset, leak, KIND)
        found = (given * scale - level[None, :] - normal * tilt[None, :]) * inverse
        if beside is not None:
            found += _load(beside, start, row, channel, ok, C)
        tl.store(dx + start * C + at, found.to(dx.dtype.element_ty), mask=ok)
