"""Functions of vectors: 2 to a power, transposition, 16-bit numbers."""

from __future__ import annotations

from llvmlite import ir

from ..exponential import EXP2_POWERS, ROUNDER
from .code import F16, F32, I1, I16, I32, Code, Value


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
    mask = ir.Constant(ir.VectorType(I32, code.machine.lanes), order)
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


def load(code: Code, pointer: Value, dtype: str, mask: Value | None = None) -> Value:
    """A vector of float32 read from an array of ``dtype``; zeros where ``mask`` is not set."""
    builder = code.builder
    kind = ir.VectorType(element(dtype), code.machine.lanes)
    align = 4 if dtype == "float32" else 2
    if mask is None:
        raw = code.load(pointer, kind, align=align)
    else:
        raw = _masked_load(code, pointer, kind, align, mask)
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
