"""Suites, baselines and comparisons: what the kernels and the tuner are worth, measured."""
