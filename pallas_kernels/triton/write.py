"""write: centres, rotates, codes and packs the keys and values of new tokens into their pages.

    y = (x - mean) R, then codes, scale and lo of y by the codec, in place, K and V in one launch

``write`` is the kernel, for affine and float codecs: a program takes a block of tokens of one head
and side. Heads are normed and turned to their positions first, if that is still to be done. The
queries that will meet the keys are made in the same launch. Tokens of other codecs are encoded by
plain JAX (reference/scatter.py).
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Int

from jkvq.pallas_kernels.formats import affine
from jkvq.pallas_kernels.formats.codecs import AffineCodec, Codec, DigitCodec, FloatCodec
from jkvq.pallas_kernels.formats.digits import Columns, columns, encode_digits
from jkvq.pallas_kernels.formats.packed import LayerIndex, Packed
from jkvq.pallas_kernels.formats.packing import WORD, pack_parts, part_widths
from jkvq.pallas_kernels.formats.words import GREATEST, as_bfloat16
from jkvq.pallas_kernels.triton.affine_tiles import clip_tile, nearest_levels, to_integers
from jkvq.pallas_kernels.triton.tiles import numbers_of
from jkvq.pallas_kernels.triton.unpack import dot
from jkvq.pallas_kernels.types import (
    InPages,
    NewHeads,
    Queries,
    TokenTransform,
    WriteSettings,
    WriteSide,
)


def writable(codec: Codec) -> bool:
    """Whether ``write`` takes a codec."""
    if isinstance(codec, AffineCodec):
        return codec.centroids is None
    if isinstance(codec, DigitCodec):
        return True
    return isinstance(codec, FloatCodec) and codec.floats != jnp.float32


def write(
    key: WriteSide,
    value: WriteSide,
    layer: LayerIndex,
    page: Int[Array, "B T"],
    slot: Int[Array, "B T"],
    *,
    real: Bool[Array, "B T"] | None = None,
    queries: NewHeads | None = None,
    settings: WriteSettings,
    interpret: bool = False,
) -> tuple[Packed, Packed, Queries | None]:
    """Both sides with token (b, t) in page ``page[b, t]``, slot ``slot[b, t]``; and the queries.

    Tokens that are not ``real`` need not be written, but may be: give them a page to spare.
    """
    sides = key, value
    for side in sides:
        if not writable(side.codec):
            raise ValueError(f"write takes affine and 16-bit float codecs, not {side.codec}")
    K = key.pages.kv_heads
    tokens = page.size
    shared = {
        "layer": _scalar(layer),
        "page": page.reshape(-1).astype(jnp.int32),
        "slot": slot.reshape(-1).astype(jnp.int32),
    }
    operands = [_operands(side) for side in sides]
    flat, tree = jax.tree.flatten([_arrays(side.pages) for side in sides])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    if real is not None:
        shared["real"] = real.reshape(-1).astype(jnp.int32)
    if queries is not None:
        shared["queries"], made = _query_operands(queries, key.transform)
        shapes += made
    group = 0 if queries is None else queries.count // K
    written = pl.pallas_call(
        functools.partial(
            _kernel,
            tree=tree,
            codecs=[numbers_of(side.codec) for side in sides],
            sources=[_source_of(side.tokens) for side in sides],
            heads=None if queries is None else _HeadNumbers.of(queries),
            settings=settings,
            interpret=interpret,
        ),
        grid=(pl.cdiv(tokens, settings.tokens), K, 2 + group),
        in_specs=[pl.no_block_spec] * len(flat)
        + [jax.tree.map(lambda _: pl.no_block_spec, x) for x in (shared, operands)],
        out_specs=[pl.no_block_spec] * len(shapes),
        out_shape=shapes,
        input_output_aliases={i: i for i in range(len(flat))},
        compiler_params=plt.CompilerParams(num_warps=settings.warps, num_stages=1),
        interpret=interpret,
        name="write",
    )(*flat, shared, operands)
    first, second = (Packed(**side) for side in jax.tree.unflatten(tree, written[: len(flat)]))
    if queries is None:
        return first, second, None
    B, T = page.shape
    made = [x.reshape(B, T, *x.shape[1:]) for x in written[len(flat) :]]
    return first, second, Queries(made[0], made[1] if made[1:] else None)


@dataclass(frozen=True)
class _HeadNumbers:
    """What a kernel is compiled for to finish heads."""

    dtype: jnp.dtype
    first: int
    eps: float
    of_one: bool

    @classmethod
    def of(cls, heads: NewHeads) -> "_HeadNumbers":
        norm = heads.norm
        by = (0.0, False) if norm is None else (norm.eps, norm.of_one)
        return cls(heads.joined.dtype, heads.first, *by)


def _source_of(tokens: NewHeads | InPages) -> _HeadNumbers | Codec:
    """What a kernel is compiled for to load tokens: new ones, or those in pages of a codec."""
    return numbers_of(tokens.codec) if isinstance(tokens, InPages) else _HeadNumbers.of(tokens)


def _query_operands(
    queries: NewHeads, transform: TokenTransform
) -> tuple[dict, list[jax.ShapeDtypeStruct]]:
    """What queries are made from, and what is made: `Queries`."""
    _, B, T, _, H = queries.joined.parts.shape
    operands = _head_operands(queries) | {"of": _scalar(transform.layer)}
    rotated = queries.joined.dtype if transform.dual is None else jnp.float32
    made = [jax.ShapeDtypeStruct((B * T, queries.count, H), rotated)]
    if transform.dual is not None:
        operands["dual"] = transform.dual
    if transform.mean is not None:
        operands["mean"] = transform.mean
        made.append(jax.ShapeDtypeStruct((B * T, queries.count, H), jnp.float32))
    return operands, made


def _head_operands(heads: NewHeads) -> dict:
    parts = heads.joined.parts
    operands = {"x": parts.reshape(len(parts), -1, *parts.shape[3:])}
    if heads.joined.bias is not None:
        operands["bias"] = heads.joined.bias
    if heads.norm is not None:
        operands["norm"] = heads.norm.weight
    if heads.rotary is not None:
        operands["rotary"] = [x.reshape(-1, x.shape[-1]) for x in heads.rotary]
    return operands


def _arrays(pages: Packed) -> dict:
    return {"codes": pages.codes} | ({} if pages.params is None else {"params": pages.params})


def _operands(side: WriteSide) -> dict:
    if isinstance(side.tokens, InPages):
        operands = {
            "pages": _arrays(side.tokens.pages),
            "page": side.tokens.page.reshape(-1).astype(jnp.int32),
            "slot": side.tokens.slot.reshape(-1).astype(jnp.int32),
        }
    else:
        operands = _head_operands(side.tokens)
    transform = side.transform
    operands["of"] = _scalar(transform.layer)
    if transform.mean is not None:
        operands["mean"] = transform.mean
    if transform.angles is not None:
        operands["angles"] = [x.reshape(-1, x.shape[-1]) for x in transform.angles]
    if transform.rotation is not None:
        operands["rotation"] = transform.rotation
    if isinstance(side.codec, AffineCodec) and side.codec.clip is not None:
        operands["clip"] = side.codec.clip.reshape(1)
    return operands


def _columns(codec: Codec, channels: int) -> Columns | None:
    """The columns of a codec with digits."""
    if not isinstance(codec, DigitCodec):
        return None
    return columns(codec.digits, codec.bits, channels)


def _scalar(x: LayerIndex) -> Int[Array, " 1"]:
    return jnp.asarray(x, jnp.int32).reshape(1)


def _matrix(ref, layer, head):
    """The layer's and head's own, of matrices [L, K, H, H] or one for all, [1, 1, H, H]."""
    return ref[layer % ref.shape[0], head % ref.shape[1]]


def _kernel(*refs, tree, codecs, sources, heads, settings: WriteSettings, interpret: bool):
    count = tree.num_leaves
    shared, operands = refs[count : count + 2]
    outputs = refs[count + 2 :]  # the pages again, the same memory, and the queries
    pages = jax.tree.unflatten(tree, outputs[:count])
    block, head, mine = (pl.program_id(axis) for axis in range(3))

    # What reaches past the end does the last token again.
    token = block * settings.tokens + jnp.arange(settings.tokens, dtype=jnp.int32)
    token = jnp.minimum(token, shared["page"].shape[0] - 1)

    for side in range(2):
        # A program does one side: twice as many work at once.
        @pl.when(mine == side)
        def _(side=side):
            own = operands[side], sources[side], codecs[side]
            _write_side(pages[side], shared, *own, head, token, interpret=interpret)

    if "queries" in shared:

        @pl.when(mine >= 2)
        def _():
            group = pl.num_programs(2) - 2
            number = head * group + mine - 2  # of the query head
            _make_queries(shared["queries"], heads, outputs[count:], head, number, token)


def _make_queries(operands: dict, numbers: _HeadNumbers, outputs, head, number, token):
    """Makes one query head of some tokens; ``head`` is its KV head."""
    of, half = operands["of"][0], operands["x"].shape[-1] // 2
    channel = jnp.arange(2 * half, dtype=jnp.int32)[None]
    q, other = _finished(operands, numbers, number, token, channel)
    at, rotated = (token[:, None], number, channel), q
    if "dual" in operands:
        R = _matrix(operands["dual"], of, head)
        rotated = dot(q.astype(jnp.float16), R, (1, 0))
    outputs[0][at] = rotated.astype(outputs[0].dtype)
    if "mean" in operands:
        channels = channel, _partner(channel, half)
        mean, partner = (operands["mean"][of, head, c] for c in channels)
        along, across = q * mean + other * partner, q * partner - other * mean
        outputs[1][at] = jnp.where(channel < half, along, across)


def _partner(channel, half: int):
    """The other channels of the same pairs."""
    return (channel + half) % (2 * half)


def _finished(operands: dict, numbers: _HeadNumbers, head, token, channel):
    """A head of tokens, [tokens, H] in float32, and the other channels of the same pairs."""
    ref, half = operands["x"], operands["x"].shape[-1] // 2
    partner = _partner(channel, half)

    def rounded(x):
        return x.astype(numbers.dtype).astype(jnp.float32)

    def load(channel):
        of = numbers.first + head
        total = ref[0, token[:, None], of, channel].astype(jnp.float32)
        for part in range(1, ref.shape[0]):
            total = total + ref[part, token[:, None], of, channel]
        if "bias" in operands:
            total = total + operands["bias"][of, channel].astype(jnp.float32)
        return rounded(total)

    both = [load(channel), load(partner)]
    if "norm" in operands:
        square = jnp.sum(both[0] * both[0], axis=1, keepdims=True)
        inverse = lax.rsqrt(square / (2 * half) + numbers.eps)
        weights = (operands["norm"][c].astype(jnp.float32) for c in (channel, partner))
        if numbers.of_one:
            both = [rounded(x * inverse * (1.0 + w)) for x, w in zip(both, weights, strict=True)]
        else:
            both = [rounded(rounded(x * inverse) * w) for x, w in zip(both, weights, strict=True)]
    if "rotary" in operands:
        cos, sin = (x[token[:, None], channel % half] for x in operands["rotary"])
        sin = jnp.where(channel < half, -sin, sin)
        one, other = both
        both = [rounded(one * cos + other * sin), rounded(other * cos - one * sin)]
    return both


def _write_side(
    pages: dict,
    shared: dict,
    operands: dict,
    source: _HeadNumbers | Codec,
    codec: Codec,
    head,
    token,
    *,
    interpret: bool,
):
    """Writes some tokens to one side, if one of them is real."""
    found = _columns(codec, _channels(operands, source))
    layer, levels = shared["layer"][0], affine.nearest_levels if interpret else nearest_levels

    def write_all():
        x = _load(operands, source, layer, head, token, None if found is None else found.channel)
        slot = shared["page"][token], shared["slot"][token]
        if isinstance(codec, FloatCodec):
            _store(pages["codes"], layer, head, slot, 0, _words(x, codec.floats))
            return
        assert isinstance(codec, AffineCodec | DigitCodec)
        if isinstance(codec, AffineCodec):
            codes, *params = _encode(x, codec, operands, levels)
        else:
            assert found is not None
            codes, *params = encode_digits(x, codec.digits, codec.bits, levels)
            codes = to_integers(codes) >> (codec.bits * found.digit)[None]
        first = 0
        for words in pack_parts(codes, codec.bits):
            _store(pages["codes"], layer, head, slot, first, words)
            first += words.shape[1]
        for side, number in enumerate(params):
            _store_numbers(pages["params"], layer, head, slot, side, _words(number, jnp.bfloat16))

    if "real" in shared:
        pl.when(shared["real"][token].max() > 0)(write_all)
    else:
        write_all()


def _encode(x, codec: AffineCodec, operands: dict, levels):
    """(codes, scale, lo) of tokens [tokens, H]."""
    if "clip" in operands:
        x = clip_tile(x, operands["clip"][0])
    encode = affine.encode_fitted if codec.step == "fitted" else affine.encode_min_max
    shape, group = x.shape, codec.group or x.shape[1]
    if group < shape[1]:
        x = x.reshape(shape[0], -1, group)
    codes, scale, lo = encode(x, codec.bits, levels)
    return to_integers(codes).reshape(shape), scale, lo


def _channels(operands: dict, source: _HeadNumbers | Codec) -> int:
    """Of the heads of tokens."""
    if isinstance(source, _HeadNumbers):
        return operands["x"].shape[-1]
    words = operands["pages"]["codes"].shape[-1]
    return words * WORD // source.bits if isinstance(source, AffineCodec) else words


def _load(operands: dict, source: _HeadNumbers | Codec, layer, head, token, column=None):
    """Tokens, transformed, in float32, [tokens, H], or these columns of them."""
    H, of, R = _channels(operands, source), operands["of"][0], None
    if "rotation" in operands:
        R = _matrix(operands["rotation"], of, head)  # its columns are those asked for
    channel = jnp.arange(H, dtype=jnp.int32) if R is not None or column is None else column
    channel, unfinished = channel[None], "norm" in operands or "rotary" in operands
    assert not unfinished or channel.shape[1] == H  # digits of keys come with a rotation
    if isinstance(source, _HeadNumbers):
        x, _ = _finished(operands, source, head, token, channel)
    else:
        x = _stored(operands, source, layer, head, token, channel, H)
    x = x.astype(jnp.float32)
    if "mean" in operands:
        x = x - _mean(operands, of, head, token, channel)
    return x if R is None else dot(x.astype(jnp.float16), R, (1, 0))


def _stored(operands: dict, codec: Codec, layer, head, token, channel, H: int):
    """These channels of tokens as pages hold them."""
    pages, page, slot = operands["pages"], operands["page"][token], operands["slot"][token]

    def words(channel):
        return pages["codes"][layer, page[:, None], head, slot[:, None], channel]

    if isinstance(codec, FloatCodec):
        return lax.bitcast_convert_type(words(channel), codec.floats)
    assert isinstance(codec, AffineCodec) and part_widths(codec.bits) == [codec.bits]
    of_plane = H * codec.bits // WORD  # the words of a plane (packing.py)
    shift = codec.bits * (channel // of_plane)
    codes = words(channel % of_plane).astype(jnp.int32) >> shift & (2**codec.bits - 1)
    scale, lo = (_bfloat16(pages["params"][layer, page, head, side, slot]) for side in range(2))
    return lo[:, None] + scale[:, None] * codes.astype(jnp.float32)


def _bfloat16(words):
    """The numbers of these words, in float32."""
    return lax.bitcast_convert_type(words.astype(jnp.uint32) << 16, jnp.float32)


def _mean(operands: dict, layer, head, token, channel):
    """The mean of tokens, [tokens or 1, H], where it stands."""
    ref, half = operands["mean"], operands["mean"].shape[-1] // 2
    mean = ref[layer, head, channel]
    if "angles" not in operands:
        return mean
    other = ref[layer, head, _partner(channel, half)]
    cos, sin = (x[token[:, None], channel] for x in operands["angles"])
    return mean * cos.astype(jnp.float32) + other * sin.astype(jnp.float32)


def _store(ref, layer, head, slot: tuple, first: int, words):
    """Words [tokens, n] of the tokens in (page, slot)."""
    page, slot = (x[:, None] for x in slot)
    column = first + jnp.arange(words.shape[1], dtype=jnp.int32)[None]
    ref[layer, page, head, slot, column] = words


def _store_numbers(ref, layer, head, slot: tuple, side: int, words):
    """The numbers of each group, [tokens, n] or, of one group, [tokens]: scales first, then los."""
    page, slot = slot
    if words.ndim == 1:
        ref[layer, page, head, side, slot] = words
        return
    n = words.shape[1]
    column = side * n + jnp.arange(n, dtype=jnp.int32)[None]
    ref[layer, page[:, None], head, column, slot[:, None]] = words


def _words(x, floats):
    """The words of 16-bit floats."""
    if floats == jnp.float16:
        x = jnp.minimum(jnp.maximum(x, -GREATEST), GREATEST)
        return lax.bitcast_convert_type(x.astype(floats), jnp.uint16)
    bits = lax.bitcast_convert_type(as_bfloat16(x), jnp.uint32) >> 16
    return bits.astype(jnp.uint16)
