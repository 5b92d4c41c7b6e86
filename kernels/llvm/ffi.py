"""XLA's foreign function interface in LLVM: a handler whose tasks run on XLA's own threads.

Offsets are those of ``xla/ffi/api/c_api.h``, whose binary interface is kept
stable (major version 0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .code import I8, I32, I64, PTR, Code, Machine, Value

#: Offsets in bytes: of XLA_FFI_CallFrame, _Buffer, _Api and the structures of their arguments.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT, _FRAME_ARGS, _FRAME_RETS = 8, 16, 24, 72, 112
_BUFFER_DATA, _BUFFER_DIMS = 24, 40
_API_ERROR_DESTROY, _API_SCHEDULE = 64, 136
_EXTENSION_TYPE, _EXTENSION_METADATA, _METADATA_EXTENSION = 8, 24, 1
_METADATA_VERSION_TRAITS = (24, 28, 32)
#: Of the interface, as in jaxlib 0.10.
_VERSION = (0, 3)

#: Words of a job: tasks taken, tasks done, threads that may still look at it, tasks in all,
#: threads that have joined, then one per argument.
_TAKEN, _DONE, _HOLDERS, _TASKS, _JOINED, _FIRST = 0, 8, 16, 17, 18, 24
#: Words of the largest structure of arguments, which ends a job.
_REQUEST = 5


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that a handler is called with.

    Attributes:
        data: Its address.
        dims: Its sizes, for as many axes as were asked for.
    """

    data: Value
    dims: tuple[Value, ...]


def handler(
    module: ir.Module,
    machine: Machine,
    name: str,
    ranks: tuple[tuple[int, ...], tuple[int, ...]],
    tasks: Callable[[Code, list[Buffer]], Value],
    body: Callable[[Code, list[Buffer], Value, Value], None],
) -> None:
    """Adds to ``module`` an XLA FFI handler that runs tasks in parallel.

    Threads of XLA's pool and the calling one take tasks until none is left; a
    thread of the pool that comes too late finds nothing to do. The call ends
    when all tasks are done, whether or not the pool helped.

    Args:
        module: Where the functions go.
        machine: What the processor offers.
        name: Of the handler.
        ranks: Number of axes of each argument and of each result.
        tasks: Writes the count of tasks, from the buffers.
        body: Writes one task: from the buffers (arguments, then results), its
            number, and that of the thread that runs it. The last result has a first
            axis as long as threads may take part, and a row for each.
    """
    flat = (*ranks[0], *ranks[1])
    worker = _worker(module, machine, f"{name}.worker", flat, body)
    helper = _helper(module, machine, f"{name}.helper", worker)
    function = ir.Function(module, ir.FunctionType(PTR, [PTR]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    code = Code(module, machine, builder)
    (frame,) = function.args
    extension = _pointer(code, frame, _FRAME_EXTENSION)
    with code.when(builder.icmp_unsigned("!=", extension, PTR(None))):
        kind = code.load(code.at(extension, _EXTENSION_TYPE, I8), I32)
        with code.when(builder.icmp_signed("==", kind, I32(_METADATA_EXTENSION))):
            _describe(code, _pointer(code, extension, _EXTENSION_METADATA))
            builder.ret(PTR(None))
    words = [_raw_buffer(code, frame, _FRAME_ARGS, n, rank) for n, rank in enumerate(ranks[0])]
    words += [_raw_buffer(code, frame, _FRAME_RETS, n, rank) for n, rank in enumerate(ranks[1])]
    count = tasks(code, words)
    values = [word for buffer in words for word in (buffer.data, *buffer.dims)]
    job = builder.call(
        _libc(module, "malloc", PTR, [I64]), [I64(8 * (_FIRST + len(values) + _REQUEST))]
    )
    helpers = code.most(code.sub(code.least(count, words[-1].dims[0]), 1), 0)
    for word, value in (
        (_TAKEN, 0), (_DONE, 0), (_HOLDERS, code.add(helpers, 1)), (_TASKS, count), (_JOINED, 0),
        *enumerate(values, _FIRST),
    ):  # fmt: skip
        code.store(code.index(value), code.at(job, word, I64))
    api = _pointer(code, frame, _FRAME_API)
    with code.loop(0, helpers):
        _schedule(
            code,
            api,
            _pointer(code, frame, _FRAME_CONTEXT),
            helper,
            job,
            code.at(job, _FIRST + len(values), I64),
        )
    builder.call(worker, [job])
    _wait(code, code.at(job, _DONE, I64), count)
    _release(code, job)
    builder.ret(PTR(None))


def _worker(module: ir.Module, machine: Machine, name: str, ranks: Any, body: Any) -> Any:
    """A function that takes tasks of a job until none is left."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    code = Code(module, machine, builder)
    (job,) = function.args
    buffers, word = [], _FIRST
    for rank in ranks:
        data = code.load(code.at(job, word, I64), PTR)
        dims = [code.load(code.at(job, word + 1 + axis, I64), I64) for axis in range(rank)]
        buffers.append(Buffer(data, tuple(dims)))
        word += 1 + rank
    count = code.load(code.at(job, _TASKS, I64), I64)
    thread = builder.atomic_rmw("add", code.at(job, _JOINED, I64), I64(1), "monotonic")
    take = builder.append_basic_block("take")
    run = builder.append_basic_block("run")
    end = builder.append_basic_block("end")
    builder.branch(take)
    builder.position_at_end(take)
    task = builder.atomic_rmw("add", code.at(job, _TAKEN, I64), I64(1), "acq_rel")
    builder.cbranch(builder.icmp_signed("<", task, count), run, end)
    builder.position_at_end(run)
    body(code, buffers, task, thread)
    builder.atomic_rmw("add", code.at(job, _DONE, I64), I64(1), "release")
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return function


def _helper(module: ir.Module, machine: Machine, name: str, worker: Any) -> Any:
    """What a thread of the pool runs: the worker, then it lets go of the job."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    builder.call(worker, [function.args[0]])
    _release(Code(module, machine, builder), function.args[0])
    builder.ret_void()
    return function


def _schedule(
    code: Code, api: Value, context: Value, helper: Any, job: Value, request: Value
) -> None:
    """Asks XLA's pool to run ``helper``; where it cannot, the caller works alone."""
    builder = code.builder
    for word, value in enumerate((I64(40), PTR(None), context, helper, job)):
        code.store(value, code.at(request, word, I64))
    error = _call(code, api, _API_SCHEDULE, PTR, request)
    with code.when(builder.icmp_unsigned("!=", error, PTR(None))):
        for word, value in enumerate((I64(24), PTR(None), error)):
            code.store(value, code.at(request, word, I64))
        _call(code, api, _API_ERROR_DESTROY, ir.VoidType(), request)
        _release(code, job)


def _release(code: Code, job: Value) -> None:
    """Lets go of ``job``, which the last holder frees."""
    held = code.builder.atomic_rmw("sub", code.at(job, _HOLDERS, I64), I64(1), "acq_rel")
    with code.when(code.builder.icmp_signed("==", held, I64(1))):
        code.builder.call(_libc(code.module, "free", ir.VoidType(), [PTR]), [job])


def _wait(code: Code, address: Value, count: Value) -> None:
    """Waits for tasks that other threads have begun."""
    builder = code.builder
    look = builder.append_basic_block("look")
    rest = builder.append_basic_block("rest")
    end = builder.append_basic_block("end")
    builder.branch(look)
    builder.position_at_end(look)
    done = builder.load_atomic(address, "acquire", 8, typ=I64)
    builder.cbranch(builder.icmp_signed("<", done, count), rest, end)
    builder.position_at_end(rest)
    builder.call(_libc(code.module, "sched_yield", I32, []), [])
    builder.branch(look)
    builder.position_at_end(end)


def _describe(code: Code, metadata: Value) -> None:
    """Answers which version of the interface this is written for; XLA refuses one too old."""
    for offset, number in zip(_METADATA_VERSION_TRAITS, (*_VERSION, 0), strict=True):
        code.store(I32(number), code.at(metadata, offset, I8))


def _raw_buffer(code: Code, frame: Value, offset: int, number: int, rank: int) -> Buffer:
    pointers = _pointer(code, frame, offset)
    buffer = code.load(code.at(pointers, number, PTR), PTR)
    dims = _pointer(code, buffer, _BUFFER_DIMS)
    sizes = tuple(code.load(code.at(dims, axis, I64), I64) for axis in range(rank))
    return Buffer(_pointer(code, buffer, _BUFFER_DATA), sizes)


def _pointer(code: Code, base: Value, offset: int) -> Value:
    return code.load(code.at(base, offset, I8), PTR)


def _libc(module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type]) -> Any:
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


def _call(code: Code, base: Value, offset: int, result: ir.Type, request: Value) -> Value:
    """A call of the function whose address is at ``base`` + ``offset`` bytes."""
    kind = ir.FunctionType(result, [PTR])
    function = code.load(code.at(base, offset, I8), ir.PointerType(kind))
    return code.builder.call(function, [request])
