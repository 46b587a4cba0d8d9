"""Statistics of prompts and whole decode steps by Triton kernels."""
