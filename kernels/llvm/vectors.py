"""Functions of vectors: 2 to a power, transposition, 16-bit numbers."""

from __future__ import annotations

from llvmlite import ir

from ..exponential import EXP2_POWERS, ROUNDER
from .code import BF16, F16, F32, I1, I16, I32, Code, Value


def exp2(code: Code, x: Value) -> Value:
    """2^x of x ≤ 127, exactly 0 below -126.5; as ``polynomial_exp``, with its accuracy."""
    builder = code.builder
    least = code.constant(-127.0)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    shifted = builder.fadd(x, code.constant(ROUNDER))
    whole = builder.fsub(shifted, code.constant(ROUNDER))
    part = builder.fsub(x, whole)
    value = code.constant(float(EXP2_POWERS[0]))
    for power in EXP2_POWERS[1:]:
        value = code.fma(value, part, code.constant(float(power)))
    bits = builder.bitcast(shifted, code.integers)
    # The low bits of ``shifted`` hold the whole part; its exponent's own bits are shifted out.
    bits = builder.shl(builder.add(bits, code.integer(127)), code.integer(23))
    return builder.fmul(value, builder.bitcast(bits, code.vector))


def transpose(code: Code, rows: list[Value]) -> list[Value]:
    """As many vectors as they have lanes, with rows and lanes exchanged."""
    lanes = code.machine.lanes
    distance = 1
    while distance < lanes:
        swapped = list(rows)
        for low in range(lanes):
            if low & distance:
                continue
            high = low | distance
            a, b = rows[low], rows[high]
            first = [n if not n & distance else lanes + (n ^ distance) for n in range(lanes)]
            second = [n | distance if not n & distance else lanes + n for n in range(lanes)]
            swapped[low] = _shuffle(code, a, b, first)
            swapped[high] = _shuffle(code, a, b, second)
        rows = swapped
        distance *= 2
    return rows


def _shuffle(code: Code, a: Value, b: Value, order: list[int]) -> Value:
    mask = ir.Constant(ir.VectorType(I32, len(order)), order)
    return code.builder.shuffle_vector(a, b, mask)


def lanes_below(code: Code, count: Value) -> Value:
    """A mask of the lanes whose number is below ``count``, an i64."""
    builder = code.builder
    numbers = ir.Constant(code.integers, list(range(code.machine.lanes)))
    limit = code.splat(builder.trunc(count, I32))
    return builder.icmp_signed("<", numbers, limit)


def element(dtype: str) -> ir.Type:
    """The type of an array's elements in memory."""
    return {"float32": F32, "float16": F16, "bfloat16": I16}[dtype]


def load_raw(code: Code, pointer: Value, dtype: str, mask: Value | None = None) -> Value:
    """As many elements of ``dtype`` as a vector has lanes; zeros where ``mask`` is not set."""
    kind = ir.VectorType(element(dtype), code.machine.lanes)
    align = 4 if dtype == "float32" else 2
    if mask is None:
        return code.load(pointer, kind, align=align)
    return _masked_load(code, pointer, kind, align, mask)


def load(code: Code, pointer: Value, dtype: str, mask: Value | None = None) -> Value:
    """A vector of float32 read from an array of ``dtype``; zeros where ``mask`` is not set."""
    builder, raw = code.builder, load_raw(code, pointer, dtype, mask)
    if dtype == "float32":
        return raw
    if dtype == "float16":
        return builder.fpext(raw, code.vector)
    wide = builder.shl(builder.zext(raw, code.integers), code.integer(16))
    return builder.bitcast(wide, code.vector)


def store(code: Code, value: Value, pointer: Value, dtype: str, mask: Value | None = None) -> None:
    """Writes a vector of float32 to an array of ``dtype``, where ``mask`` is set."""
    builder = code.builder
    kind = ir.VectorType(element(dtype), code.machine.lanes)
    align = 4 if dtype == "float32" else 2
    if dtype == "float16":
        value = builder.fptrunc(value, kind)
    elif dtype == "bfloat16":
        value = builder.trunc(_rounded_to_bfloat16(code, value), kind)
    if mask is None:
        code.store(value, pointer, align=align)
        return
    name = f"llvm.masked.store.{_kind_name(kind)}.p0"
    masks = ir.VectorType(I1, code.machine.lanes)
    known = code.module.globals.get(name) or ir.Function(
        code.module, ir.FunctionType(ir.VoidType(), [kind, pointer.type, I32, masks]), name
    )
    builder.call(known, [value, pointer, I32(align), mask])


def side_by_side(code: Code, first: Value, second: Value) -> Value:
    """A vector of words: the lanes of two vectors one after the other, as bfloat16."""
    return code.builder.bitcast(_both(code, first, second), code.integers)


def pairs(code: Code, low: Value, high: Value) -> Value:
    """A vector of words: lane by lane the pairs of two vectors, as bfloat16."""
    lanes = code.machine.lanes
    both = _both(code, low, high)
    order = [lane + part for lane in range(lanes) for part in (0, lanes)]
    return code.builder.bitcast(_shuffle(code, both, both, order), code.integers)


def _both(code: Code, first: Value, second: Value) -> Value:
    """Two vectors as one of bfloat16, rounded to nearest, as 16-bit integers."""
    builder, lanes = code.builder, code.machine.lanes
    wide = ir.VectorType(I16, 2 * lanes)
    if code.machine.dots == "avx512":
        name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BF16, 2 * lanes)
        return builder.bitcast(code.call(name, kind, (second, first)), wide)
    narrow = ir.VectorType(I16, lanes)
    halves = [builder.trunc(_rounded_to_bfloat16(code, one), narrow) for one in (first, second)]
    return _shuffle(code, halves[0], halves[1], list(range(2 * lanes)))


def dot(code: Code, left: Value, right: Value, total: Value) -> Value:
    """``total`` with the products of two vectors of words of pairs of bfloat16."""
    if code.machine.dots == "avx512":
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return code.call(name, code.vector, (total, left, right))
    builder = code.builder
    lows = [builder.shl(words, code.integer(16)) for words in (left, right)]
    highs = [builder.and_(words, code.integer(-0x10000)) for words in (left, right)]
    for halves in (lows, highs):
        one, other = (builder.bitcast(half, code.vector) for half in halves)
        total = code.fma(one, other, total)
    return total


def pair_of_ones(code: Code) -> Value:
    """A vector of words that each hold 1 and 1."""
    return code.integer(0x3F803F80)


def _rounded_to_bfloat16(code: Code, value: Value) -> Value:
    """Its bits rounded to nearest, ties to even, in the lower half of each lane."""
    builder = code.builder
    bits = builder.bitcast(value, code.integers)
    upper = builder.lshr(bits, code.integer(16))
    odd = builder.and_(upper, code.integer(1))
    rounded = builder.lshr(
        builder.add(builder.add(bits, odd), code.integer(0x7FFF)), code.integer(16)
    )
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(nan, builder.or_(upper, code.integer(0x40)), rounded)


def _masked_load(code: Code, pointer: Value, kind: ir.Type, align: int, mask: Value) -> Value:
    name = f"llvm.masked.load.{_kind_name(kind)}.p0"
    known = code.module.globals.get(name) or ir.Function(
        code.module, ir.FunctionType(kind, [pointer.type, I32, mask.type, kind]), name
    )
    zeros = ir.Constant(kind, None)
    return code.builder.call(known, [pointer, I32(align), mask, zeros])


def _kind_name(kind: ir.VectorType) -> str:
    return f"v{kind.count}" + {"float": "f32", "half": "f16", "i16": "i16"}[str(kind.element)]
