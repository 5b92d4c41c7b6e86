"""A thin layer over llvmlite's builder: typed addresses, counted loops, vectors of floats."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

F32 = ir.FloatType()
F16 = ir.HalfType()
I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
PTR = ir.PointerType()


class _BFloat16(ir.Type):  # type: ignore[misc]
    """A type that LLVM has and llvmlite's builder lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BF16 = _BFloat16()

#: Value of an LLVM program.
Value = Any


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the processor's vector registers hold.

    Attributes:
        lanes: float32 values of a vector.
        registers: Vector registers.
        dots: How two neighbours of bfloat16 are multiplied by two others and added up: "avx512"
            by that instruction, "plain" by others (slow, for tests), None not at all.
    """

    lanes: int
    registers: int
    dots: str | None = None

    @property
    def vectors(self) -> int:
        """Vectors side by side in a tile of a product: more spill, fewer wait for loads."""
        return 4 if self.registers >= 32 else 2

    @property
    def width(self) -> int:
        """float32 values of the vectors of a tile."""
        return self.vectors * self.lanes

    def rows(self, vectors: int) -> int:
        """Rows of a tile ``vectors`` wide whose sums all stay in registers."""
        return max(1, min(12, (self.registers - 2 - vectors) // vectors))


class Code:
    """The body of one LLVM function while it is being written."""

    def __init__(self, module: ir.Module, machine: Machine, builder: ir.IRBuilder) -> None:
        self.module = module
        self.machine = machine
        self.builder = builder
        self.vector = ir.VectorType(F32, machine.lanes)
        self.integers = ir.VectorType(I32, machine.lanes)

    @staticmethod
    def index(value: int | Value) -> Value:
        """An index: a Python number as a constant, anything else as it is."""
        return I64(value) if isinstance(value, int) else value

    # Arithmetic of indices.

    def add(self, a: Any, b: Any) -> Value:
        return self.builder.add(self.index(a), self.index(b))

    def sub(self, a: Any, b: Any) -> Value:
        return self.builder.sub(self.index(a), self.index(b))

    def mul(self, a: Any, b: Any) -> Value:
        return self.builder.mul(self.index(a), self.index(b))

    def div(self, a: Any, b: Any) -> Value:
        return self.builder.udiv(self.index(a), self.index(b))

    def rem(self, a: Any, b: Any) -> Value:
        return self.builder.urem(self.index(a), self.index(b))

    def least(self, a: Any, b: Any) -> Value:
        a, b = self.index(a), self.index(b)
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def most(self, a: Any, b: Any) -> Value:
        a, b = self.index(a), self.index(b)
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def ceil(self, a: Any, b: Any) -> Value:
        """a / b, rounded up."""
        return self.div(self.sub(self.add(a, b), 1), b)

    # Memory.

    def at(self, pointer: Value, index: Any, kind: ir.Type = F32) -> Value:
        """The address of element ``index`` of an array of ``kind``."""
        return self.builder.gep(pointer, [self.index(index)], source_etype=kind)

    def load(self, pointer: Value, kind: ir.Type, align: int | None = None) -> Value:
        return self.builder.load(pointer, align=align, typ=kind)

    def store(self, value: Value, pointer: Value, align: int | None = None) -> None:
        self.builder.store(value, pointer, align=align)

    def load_vector(self, pointer: Value) -> Value:
        return self.load(pointer, self.vector, align=4)

    def store_vector(self, value: Value, pointer: Value) -> None:
        self.store(value, pointer, align=4)

    # Vectors of floats.

    def splat(self, scalar: Value) -> Value:
        kind = ir.VectorType(scalar.type, self.machine.lanes)
        mask = ir.Constant(ir.VectorType(I32, self.machine.lanes), [0] * self.machine.lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)

    def constant(self, number: float) -> Value:
        return ir.Constant(self.vector, [number] * self.machine.lanes)

    def integer(self, number: int) -> Value:
        return ir.Constant(self.integers, [number] * self.machine.lanes)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a · b + c, rounded once where the processor can."""
        return self.intrinsic("llvm.fmuladd", (a, b, c))

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger in each lane; ``b`` where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def intrinsic(self, name: str, arguments: Sequence[Value]) -> Value:
        kind = arguments[0].type
        return self.call(f"{name}.{_mangled(kind)}", kind, arguments)

    def call(self, name: str, result: ir.Type, arguments: Sequence[Value]) -> Value:
        """A call of a function of LLVM's own."""
        known = self.module.globals.get(name)
        if known is None:
            signature = ir.FunctionType(result, [argument.type for argument in arguments])
            known = ir.Function(self.module, signature, name)
        return self.builder.call(known, list(arguments))

    # Control.

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """``for i in range(start, stop, step)`` around the body of the with statement."""
        with self._counted(start, stop, step, ()) as (counter, _, carried):
            yield counter
            carried[:] = []

    def fold(
        self,
        start: Any,
        stop: Any,
        step: Any,
        initial: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """A loop that carries values, which ``body`` takes and gives anew."""
        with self._counted(start, stop, step, initial) as (counter, values, carried):
            carried[:] = body(counter, values)
        return values

    @contextlib.contextmanager
    def _counted(
        self, start: Any, stop: Any, step: Any, initial: Sequence[Value]
    ) -> Iterator[tuple[Value, list[Value], list[Value]]]:
        builder = self.builder
        entry = builder.block
        head = builder.append_basic_block("head")
        body = builder.append_basic_block("body")
        end = builder.append_basic_block("end")
        builder.branch(head)
        builder.position_at_end(head)
        counter = builder.phi(I64)
        counter.add_incoming(self.index(start), entry)
        values = [builder.phi(value.type) for value in initial]
        for phi, value in zip(values, initial, strict=True):
            phi.add_incoming(value, entry)
        builder.cbranch(builder.icmp_signed("<", counter, self.index(stop)), body, end)
        builder.position_at_end(body)
        carried: list[Value] = []
        yield counter, values, carried
        following = self.add(counter, step)
        counter.add_incoming(following, builder.block)
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(end)

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition):
            yield


def _mangled(kind: ir.Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_mangled(kind.element)}"
    return {"float": "f32", "half": "f16", "double": "f64"}.get(str(kind), str(kind))
