"""The methods written out in numpy, one token and head at a time, from their definitions.

Nothing here shares code with jkvq: these are the independent side of the comparisons.
"""

import functools

import numpy as np


def bf16(x):
    """Rounded to bfloat16, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def pack_planes(codes, bits):
    """Words of the codes of a head: parts of 8, 4, 2, 1 bits, low first, with planes in each."""
    out, shift = [], 0
    for width in (8, 4, 2, 1):
        if not bits & width:
            continue
        stride = len(codes) * width // 16
        for word in range(stride):
            value = 0
            for i in range(16 // width):
                part = (int(codes[word + i * stride]) >> shift) % 2**width
                value |= part << (i * width)
            out.append(value)
        shift += width
    return np.array(out, np.uint16)


def pack_bits(codes, widths):
    """Words of codes of unequal widths, one after the other, low bits first."""
    bits = [
        (int(code) >> i) & 1
        for code, width in zip(codes, widths, strict=True)
        for i in range(width)
    ]
    return np.array(
        [
            sum(bit << j for j, bit in enumerate(bits[at : at + 16]))
            for at in range(0, len(bits), 16)
        ],
        np.uint16,
    )


def clip(x, quantile):
    limit = np.quantile(np.abs(x), quantile)
    return np.clip(x, -limit, limit)


def affine_min_max(x, bits, group):
    """(codes, scales, los, distance of each value to the nearest rounding tie, in steps)."""
    codes, scales, los, ties = [], [], [], []
    for part in x.reshape(-1, group):
        lo, hi = part.min(), part.max()
        scale, lo = bf16((hi - lo) / (2**bits - 1)), bf16(lo)
        if scale == 0:
            codes += [0] * group
            ties += [0.5] * group
        else:
            level = (part - lo) / scale
            codes += list(np.clip(np.floor(level + 0.5), 0, 2**bits - 1))
            ties += list(np.abs(level + 0.5 - np.round(level + 0.5)))
        scales.append(scale)
        los.append(lo)
    return np.array(codes), np.array(scales), np.array(los), np.array(ties)


# The best step for a Gaussian of variance 1, and the squared error that it leaves
STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352, 6: 0.1041, 8: 0.0308}
ERROR = {2: 0.1188, 3: 0.0374, 4: 0.0115, 6: 0.0010, 8: 0.0001}


def affine_fitted(x, bits, group):
    """The same with the fitted step and the stretch."""
    codes, scales, los, ties = [], [], [], []
    for part in x.reshape(-1, group):
        scale = STEP[bits] * part.std()
        lo = part.mean() - scale * (2**bits - 1) / 2
        for _ in range(2):
            code = np.clip(np.floor((part - lo) / scale + 0.5), 0, 2**bits - 1)
            if code.std() > 0:
                scale, lo = np.polyfit(code, part, 1)
        level = (part - lo) / scale
        code = np.clip(np.floor(level + 0.5), 0, 2**bits - 1)
        decoded = lo + scale * code
        stretch = (part @ part) / (decoded @ part) if decoded @ part > 0 else 1.0
        codes += list(code)
        ties += list(np.abs(level + 0.5 - np.round(level + 0.5)))
        scales.append(bf16(scale * stretch))
        los.append(bf16(lo * stretch))
    return np.array(codes), np.array(scales), np.array(los), np.array(ties)


def affine_digits(x, bits, digits):
    """(columns of digits, scale, lo, ties of channels) with so many digits for each quarter."""
    count = np.repeat(digits, len(x) // 4)
    stored = count > 0
    y, k = x[stored], count[stored]
    w = (2.0 ** (bits * k) - 1) / (2**bits - 1)
    start = (w @ y) / (w @ w)
    ratio = np.array([STEP[bits * n] / STEP[bits] for n in k])
    scale = STEP[bits] * np.sqrt(np.mean(((y - start * w) * ratio) ** 2))
    lo = start - scale * (2**bits - 1) / 2

    def coded():
        return np.clip(np.floor((y - lo * w) / scale + 0.5), 0, 2.0 ** (bits * k) - 1)

    for _ in range(2):
        scale, lo = np.linalg.lstsq(np.stack([coded(), w], 1), y, rcond=None)[0]
    codes, level = np.zeros(len(x), int), (y - lo * w) / scale + 0.5
    codes[stored] = coded()
    ties = np.full(len(x), 0.5)
    ties[stored] = np.abs(level - np.round(level))
    columns = [
        (part >> (bits * digit)) % 2**bits
        for part, n in zip(np.split(codes, 4), digits, strict=True)
        for digit in range(n)
    ]
    return np.concatenate(columns), bf16(scale), bf16(lo), ties


def decode_digits(columns, scale, lo, bits, digits):
    """The channels of columns."""
    parts, found = iter(np.split(np.asarray(columns, np.float64), 4)), []
    for n in digits:
        own = [next(parts) for _ in range(n)]
        if not n:
            found.append(np.zeros(len(columns) // 4))
            continue
        code = sum(part * 2 ** (bits * digit) for digit, part in enumerate(own))
        w = (2 ** (bits * n) - 1) / (2**bits - 1)
        found.append((lo * w + scale * code) / (1 - ERROR[bits * n]))
    return np.concatenate(found)


# Max (1960), table I: the positive levels for a Gaussian.
MAX_1960 = {
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


@functools.cache
def lloyd_levels(bits, size):
    """Lloyd-Max levels of a coordinate of random vectors of norm sqrt(size), by sums over angles:
    nearest edges and cell means in turn, until they rest.
    """
    bounds = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    angle = (bounds[1:] + bounds[:-1]) / 2
    value, chance = np.sqrt(size) * np.sin(angle), np.cos(angle) ** (size - 2)
    sums = [np.concatenate([[0], np.cumsum(x)]) for x in (chance * value, chance)]
    spread = np.cumsum(np.cos(angle) ** (size / 3))  # where many levels would lie
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, spread / spread[-1], value)
    for _ in range(2000):
        edges = np.arcsin((levels[1:] + levels[:-1]) / 2 / np.sqrt(size))
        edges = [bounds[0], *edges, bounds[-1]]
        levels = np.diff(np.interp(edges, bounds, sums[0])) / np.diff(
            np.interp(edges, bounds, sums[1])
        )
    return levels


def lloyd(x, widths, levels, *, fitted):
    """(codes, units) of a head with channels of equal width together; levels(width, size)."""
    codes, units = [], []
    for width in dict.fromkeys(widths):
        part = x[np.asarray(widths) == width]
        deviation = np.sqrt(part @ part / len(part))
        ratio = part / deviation if deviation > 0 else part
        own = levels(width, len(part))
        nearest = [int(np.abs(own - value).argmin()) for value in ratio]
        along = part @ own[nearest]
        codes += nearest
        units.append(np.float16(part @ part / along if fitted and along > 0 else deviation))
    return np.array(codes), np.array(units, np.float64)


def rope(
    x: np.ndarray, position: np.ndarray, frequency: np.ndarray, floats: type = np.float64
) -> np.ndarray:
    """x [T, N, H] turned by these positions, a pair of channels as one complex number.

    ``floats`` is what cos and sin are rounded to.
    """
    half, angle = len(frequency), np.outer(position, frequency)
    turn = (np.cos(angle).astype(floats) + 1j * np.sin(angle).astype(floats))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(q, k, v, visible, scale):
    """q [T, N, H] over k, v [S, K, H] where visible [T, S]; (out [T, N, H], lse [T, N])."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for t in range(q.shape[0]):
        seen = np.flatnonzero(visible[t])
        if len(seen) == 0:
            continue
        for n in range(q.shape[1]):
            scores = scale * k[seen, n // groups] @ q[t, n]
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ v[seen, n // groups] / weights.sum()
            lse[t, n] = scores.max() + np.log(weights.sum())
    return out, lse
