"""LLVM modules compiled for this processor, once in a process."""

from __future__ import annotations

import functools
import sys
from typing import Any

import llvmlite.binding as llvm

from .code import Machine

#: Engines own the machine code; they must live as long as the process may call it.
_ENGINES: list[Any] = []


@functools.cache
def refusal() -> str | None:
    """Why kernels cannot run on this machine, or None.

    Raises:
        OSError: The system lets no program write code and run it.
    """
    if sys.platform == "win32":
        return "its kernels are not made for Windows"
    features = llvm.get_host_cpu_features()
    if _is_x86() and not all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return "its kernels need a processor with AVX2, FMA and F16C"
    llvm.check_jit_execution()
    return None


def _is_x86() -> bool:
    return llvm.get_process_triple().startswith(("x86_64", "i"))


@functools.cache
def machine() -> Machine:
    """The vectors of this processor."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        dots = "avx512" if features.get("avx512bf16") and features.get("avx512bw") else None
        return Machine(lanes=16, registers=32, dots=dots)
    if _is_x86():
        return Machine(lanes=8, registers=16)
    return Machine(lanes=4, registers=32)


def compile_text(text: str, name: str) -> int:
    """Compiles a module, given as LLVM's text, and gives the address of its function ``name``."""
    target = _target()
    module = llvm.parse_assembly(text)
    module.triple = llvm.get_process_triple()
    module.data_layout = str(target.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    # They are vectors already.
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address(name))


def _target() -> Any:
    """What to compile for; each engine keeps its own."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    if machine().lanes == 16:
        features += ",-prefer-256-bit"
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )
