"""LLVM modules compiled for this processor, once in a process."""

from __future__ import annotations

import functools
import threading
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from .code import Machine

_LOCK = threading.Lock()
#: Engines own the machine code; they must live as long as the process may call it.
_ENGINES: list[Any] = []


def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    if "+avx512f" in features:
        features += ",-prefer-256-bit"
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )


@functools.cache
def machine() -> Machine:
    """The vectors of this processor."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(lanes=16, registers=32)
    if features.get("avx2") and features.get("fma"):
        return Machine(lanes=8, registers=16)
    if (
        features.get("neon")
        or "aarch64" in llvm.get_process_triple()
        or "arm64" in llvm.get_process_triple()
    ):
        return Machine(lanes=4, registers=32)
    return Machine(lanes=4, registers=16)


def compile_module(module: ir.Module, name: str) -> int:
    """Compiles ``module`` and gives the address of its function ``name``."""
    with _LOCK:
        target = _target()
        module.triple = llvm.get_default_triple()
        module.data_layout = str(target.target_data)
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = False
        options.slp_vectorization = False
        builder = llvm.create_pass_builder(target, options)
        builder.getModulePassManager().run(parsed, builder)
        engine = llvm.create_mcjit_compiler(parsed, target)
        engine.finalize_object()
        _ENGINES.append(engine)
        return int(engine.get_function_address(name))
