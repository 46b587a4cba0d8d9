"""Keys and values of whole texts outside the model's device: a row a token, in pinned memory or in a mapped file."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..arch.upstream import CacheLayerMixin
from ..errors import KVPatchError
from .state import writable

FEWEST = 256  # rows of a store
GROWTH = 1.25  # of a store that is full
MEMORY = Path("/proc/meminfo")


class PinnedRows:
    """Rows in host memory, page-locked where a device copies them."""

    def __init__(self, width: int, dtype: torch.dtype, pinned: bool) -> None:
        self.pinned = pinned
        self.rows_NE = torch.empty(0, width, dtype=dtype, device="cpu")

    def resize(self, count: int) -> None:
        """Move the rows (keys and values of tokens) to memory that has room for `count`, when `append` finds it full."""
        self.wait()  # for copies to or from the device that still run
        old_NE = self.rows_NE
        self.rows_NE = torch.empty(count, old_NE.shape[1], dtype=old_NE.dtype, pin_memory=self.pinned, device="cpu")
        self.rows_NE[: len(old_NE)] = old_NE

    def release(self) -> None:
        """Do nothing: the rows exist only in this memory, while MappedRows has a file from which they can be read again."""

    def wait(self) -> None:
        """Wait for the copies from and to a device that still run."""
        if self.pinned:
            torch.cuda.synchronize()


class MappedRows:
    """Rows in a nameless temporary file, which is mapped into memory and deleted with this object."""

    def __init__(self, width: int, dtype: torch.dtype, folder: Path | None) -> None:
        """Open a file for a layer's rows (keys and values), for `HostLayer.begin`. folder: None for the system's."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the rows are used
        self._map: mmap.mmap | None = None
        self.rows_NE = torch.empty(0, width, dtype=dtype, device="cpu")

    def resize(self, count: int) -> None:
        """Enlarge the file to `count` rows, and map it anew. Raises KVPatchError if the folder has no room."""
        width, dtype = self.rows_NE.shape[1], self.rows_NE.dtype
        size = count * width * dtype.itemsize
        try:
            _reserve(self._file.fileno(), size)
        except OSError as error:
            raise KVPatchError(
                f"lossless=True: the full cache needs {size:,} bytes for a layer in {tempfile.gettempdir()} or offload_folder, "
                f"which has no room ({error}): give offload_folder='/a/folder' on a larger disk, or shorten the text."
            ) from error
        self._map = mmap.mmap(self._file.fileno(), size)
        self.rows_NE = torch.frombuffer(self._map, dtype=dtype).view(count, width)

    def release(self) -> None:
        """Let the system take the memory of the file's pages, once attention has read a layer: the file keeps the rows."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def wait(self) -> None:
        """Do nothing: a copy from a device to such memory has ended when it returns."""


def _reserve(file: int, size: int) -> None:
    """Set the size of a layer's file and reserve its room: a write to a mapped file on a full disk would kill the process.

    `MappedRows.resize` calls it. An OSError tells that the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def find_free(folder: Path | None, device: torch.device) -> tuple[str, int | None]:
    """Return the place to which KV entries of a model on `device` are offloaded, as a phrase for errors, and its free bytes.

    The place is a folder on disk, or host memory for a GPU. None: unknown. `check_room` asks before tokens are read.
    """
    if folder is not None or device.type == "cpu":
        place = folder or Path(tempfile.gettempdir())
        return str(place), shutil.disk_usage(place).free
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()  # /proc/meminfo
        return "host memory", next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return "host memory", None


class HostLayer(CacheLayerMixin):
    """All tokens of a layer; a row is a token's keys of all heads, then its values.

    folder: of the mapped file; None: the one for temporary files on a CPU, and no file but pinned memory beside a device.
    length: rows in use. sizes: KV heads, head size of keys, and of values. device: where their entries are computed.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, folder: Path | None) -> None:
        """For `LosslessCache.__init__`: make a layer, to keep a text in host memory or a file in `folder`.

        `begin` makes its store.
        """
        super().__init__()
        self.folder, self.length = folder, 0  # length: tokens held
        self.sizes: tuple[int, int, int] = (0, 0, 0)  # KV heads, and numbers of a key and of a value
        self.store: PinnedRows | MappedRows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store for keys and values [1,H,Q,D] such as these."""
        _, H, _, K = key_states.shape
        self.begin((H, K, value_states.shape[3]), key_states.dtype, key_states.device)

    @writable
    def begin(self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Make the store, a file mapped to memory or pinned memory, as `append` writes the first tokens, or for `copy`.

        sizes: KV heads, head size of keys, and of values. device: where keys and values are computed.
        """
        H, K, V = self.sizes = sizes
        self.dtype, self.device = dtype, device
        if self.folder is not None or device.type == "cpu":
            self.store = MappedRows(H * (K + V), dtype, self.folder)
        else:
            self.store = PinnedRows(H * (K + V), dtype, device.type == "cuda")
        self.is_initialized = True

    @writable
    def append(self, k_1HQD: Tensor, v_1HQD: Tensor) -> None:
        """Write the keys and values of Q more tokens after the rows in use, for `exchange`; a full store grows."""
        if not self.is_initialized:
            self.lazy_initialization(k_1HQD, v_1HQD)
        start, stop, dtype = self.length, self.length + k_1HQD.shape[2], self.store.rows_NE.dtype
        if k_1HQD.dtype != dtype:
            raise KVPatchError(
                f"The entries of this text are {dtype}, and this pass makes {k_1HQD.dtype}: read all of a text under the same "
                "autocast."
            )
        if stop > len(self.store.rows_NE):
            self.store.resize(self.count_rows(stop))
        k_1HTD, v_1HTD = self.view(self.store.rows_NE[start:stop])
        k_1HTD.copy_(k_1HQD.detach(), non_blocking=True)
        v_1HTD.copy_(v_1HQD.detach(), non_blocking=True)
        self.length = stop

    def count_rows(self, count: int) -> int:
        """Return how many rows the store has once it has grown to take `count`: for `append`, and to check memory before."""
        held = len(self.store.rows_NE) if self.is_initialized else 0
        return held if count <= held else max(count, int(self.length * GROWTH), FEWEST)

    @writable
    def keep(self, rows_N: Tensor) -> None:
        """Keep these rows (tokens) alone, in their order, for `LosslessCache.forget`."""
        self.store.wait()  # for copies that still run
        self.store.rows_NE[: len(rows_N)] = self.used_TE[rows_N]
        self.length = len(rows_N)
        self.store.release()  # its pages in host memory

    def view(self, rows_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [1,H,T,D] in rows of E numbers, as views, for `exchange` to lend or `append` to fill."""
        H, K, V = self.sizes
        k_TE, v_TE = rows_TE.split([H * K, H * V], 1)
        return k_TE.unflatten(1, (H, K)).transpose(0, 1)[None], v_TE.unflatten(1, (H, V)).transpose(0, 1)[None]

    @property
    def used_TE(self) -> Tensor:
        """The rows in use."""
        return self.store.rows_NE[: self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return self.used_TE.nbytes if self.is_initialized else 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Refuse a pass of the model's own code."""
        raise KVPatchError("This cache can be used only under the patch that made it, which is no longer in force.")

    def copy(self) -> HostLayer:
        """Return a copy for `clone`, with a store of its own, in a new file of the same folder if this one has a file."""
        new = HostLayer(self.folder)
        if self.is_initialized:
            self.store.wait()
            new.begin(self.sizes, self.dtype, self.device)  # device: of the layer's attention; the rows are on the host
            new.append(*self.view(self.used_TE))
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the mask that transformers makes: over all tokens held and the new ones."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1, which tells transformers that a text may have any length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.15

    def reset(self) -> None:
        """Empty the layer and drop its store; the next text's first tokens make another."""
        self.length, self.is_initialized = 0, False
        vars(self).pop("store", None)  # the next text may be of another dtype
