"""Products of small matrices whose sums stay in registers: C[i, :] (+)= Σ_r A[i, r] B[r, :].

A is read one number at a time and spread over a vector, so that it may have
any strides and needs no copy of its own; the rows of B and C are vectors. Numbers are
float32; in a product of pairs those of A and B are words of two bfloat16, of which each is
a term.
"""

from __future__ import annotations

import enum
from typing import Any

from llvmlite import ir

from .code import F32, I32, I64, PTR, Code, Machine, Value
from .vectors import dot


class Sum(enum.Enum):
    """What becomes of the sums."""

    STORE = "store"
    ADD = "add"
    #: Added to C times a factor for each lane.
    RESCALE = "rescale"
    #: Stored, and their largest of each lane kept.
    MAXIMUM = "maximum"


def product(module: ir.Module, machine: Machine, vectors: int, kind: Sum, paired: bool) -> Any:
    """A function of ``module`` that multiplies by matrices ``vectors`` wide.

    Its arguments: the addresses of A, B, C and of the factors or the largest
    (``vectors`` vectors, or null); the strides of A's rows and of its columns,
    of B's rows, of C's rows; the counts of rows and of terms. All in floats, or in
    words of A and B where they are ``paired``.
    """
    name = f"product.{vectors}.{kind.value}{'.pairs' if paired else ''}"
    known = module.globals.get(name)
    if known is not None:
        return known
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR] * 4 + [I64] * 6), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    for argument in function.args[:4]:
        argument.add_attribute("noalias")
    code = Code(module, machine, ir.IRBuilder(function.append_basic_block()))
    a, b, c, extra, a_row, a_column, b_row, c_row, rows, terms = function.args
    most = machine.rows(vectors)
    whole = code.sub(rows, code.rem(rows, most))

    def tile(first: Value, count: int) -> None:
        top = code.at(a, code.mul(first, a_row))
        sums = _sums(code, top, b, a_row, a_column, b_row, terms, count, vectors, paired)
        table = [sums[row * vectors : (row + 1) * vectors] for row in range(count)]
        _finish(code, kind, table, code.at(c, code.mul(first, c_row)), c_row, extra)

    with code.loop(0, whole, most) as first:
        tile(first, most)
    # What is left in tiles of half as many rows and half again: few, so that a kernel is
    # compiled soon.
    builder, left, done = code.builder, code.sub(rows, whole), whole
    for count in reversed([2**n for n in range((most - 1).bit_length())]):
        these = builder.and_(left, I64(count))
        with code.when(builder.icmp_signed("==", these, I64(count))):
            tile(done, count)
        done = code.add(done, these)
    builder.ret_void()
    return function


def _sums(
    code: Code, a: Value, b: Value, a_row: Value, a_column: Value, b_row: Value, terms: Value,
    rows: int, vectors: int, paired: bool,
) -> list[Value]:  # fmt: skip
    """The sums of a tile, row by row."""
    one, many = (I32, code.integers) if paired else (F32, code.vector)
    add = dot if paired else Code.fma
    starts = [code.at(a, code.mul(row, a_row)) for row in range(rows)]

    def step(term: Value, sums: list[Value]) -> list[Value]:
        line = code.at(b, code.mul(term, b_row))
        places = [code.at(line, n * code.machine.lanes) for n in range(vectors)]
        right = [code.load(place, many, align=4) for place in places]
        offset = code.mul(term, a_column)
        found = []
        for row in range(rows):
            left = code.splat(code.load(code.at(starts[row], offset), one))
            for n in range(vectors):
                found.append(add(code, left, right[n], sums[row * vectors + n]))
        return found

    zeros = [code.constant(0.0)] * (rows * vectors)
    return code.fold(0, terms, 1, zeros, step)


def _finish(
    code: Code, kind: Sum, rows: list[list[Value]], c: Value, c_row: Value, extra: Value
) -> None:
    """Brings the sums of a tile to C."""
    for n in range(len(rows[0])):
        offset = n * code.machine.lanes
        beside = code.at(extra, offset)
        factor = code.load_vector(beside) if kind in (Sum.RESCALE, Sum.MAXIMUM) else None
        for number, row in enumerate(rows):
            place = code.at(c, code.add(code.mul(number, c_row), offset))
            if kind is Sum.ADD:
                row[n] = code.builder.fadd(row[n], code.load_vector(place))
            elif kind is Sum.RESCALE:
                row[n] = code.fma(factor, code.load_vector(place), row[n])
            elif kind is Sum.MAXIMUM:
                factor = code.maximum(row[n], factor)
            code.store_vector(row[n], place)
        if kind is Sum.MAXIMUM:
            code.store_vector(factor, beside)
