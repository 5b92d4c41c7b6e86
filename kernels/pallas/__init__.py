"""Back ends for kernels written in Pallas.

Each back end is one module with the same few functions (call, load, store, dot,
loop); the kernels of an op say which one they use, and know nothing else of it.
"""
