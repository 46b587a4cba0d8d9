"""Backends for attention and statistics: torch on any device, flash kernels and Triton on a GPU."""
