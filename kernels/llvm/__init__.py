"""Kernels for CPUs, written in LLVM's language by way of llvmlite and called by XLA."""
