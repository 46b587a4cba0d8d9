"""Attention of prompts and ragged steps by flash-attention kernels."""
