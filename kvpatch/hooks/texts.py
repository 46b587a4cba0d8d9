"""The text that generate() is given, compared with the one that its cache has read: the same and more, or new tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..arch.upstream import CACHE
from ..cache.cache import EvictingCache
from ..cache.token_ids import PADDING, UNKNOWN
from ..errors import KVPatchError

ANEW = (
    "A cache goes on with what it has read. To ask several questions about one text, give each a copy made before the first "
    f"one, {CACHE}=cache.clone(); after an edit take patch.new_cache() and read the text anew, with all of it as input_ids."
)


@dataclass(frozen=True)
class Given:
    """The tokens and the padding mask that generate() was given.

    ids: int [B,N]; None if it got embeddings. columns: N; None if it got no tokens. mask: [B,T], or None. columns_read: by the
    cache.
    """

    ids: Tensor | None
    columns: int | None
    mask: Tensor | None
    columns_read: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], seen: int) -> Given:
        """Find tokens and padding mask among generate()'s arguments, for `_run_with_cache`. seen: columns its cache has read.

        The result's fields are ids (None for embeddings), the number of columns (None without tokens), mask and columns_read.
        """
        mask = kwargs.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        embeds = kwargs.get("inputs_embeds")
        if isinstance(embeds, Tensor) and embeds.ndim >= 2 and embeds.shape[1]:
            return cls(None, embeds.shape[1], mask, seen)
        for given in (args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids")):
            if isinstance(given, Tensor) and given.ndim >= 2 and given.shape[1]:
                ids = given if given.ndim == 2 and not given.is_floating_point() else None
                return cls(ids, given.shape[1], mask, seen)
        return cls(None, None, mask, seen)

    @property
    def alone(self) -> bool:
        """True if only new tokens are given, under a mask of the whole text; False for embeddings."""
        told = self.mask is not None and self.ids is not None and self.columns is not None and self.columns_read > 0
        return told and self.mask.shape[1] == self.columns_read + self.columns  # type: ignore[union-attr,operator]

    @property
    def whole(self) -> int | None:
        """Columns of the whole text, with those that the cache has seen; None if not known."""
        return self.columns if self.columns is None or not self.alone else self.columns_read + self.columns


def check_mask(given: Given) -> None:
    """Raise KVPatchError, for `_run_with_cache`, unless a mask has a column for each given token, or for all seen ones too."""
    mask, new, seen = given.mask, given.columns, given.columns_read
    if mask is not None and new is not None and mask.shape[1] not in (new, seen + new):
        whole = f"{new}, or " if new > seen else ""  # fewer are no whole text
        again = " If the token is the last that was seen, it would be read twice: give what follows it." * (new == 1)
        raise KVPatchError(
            f"attention_mask has {mask.shape[1]} columns, but {seen} tokens were seen and {new} are given: give {whole}"
            f"{seen + new} over both.{again * (mask.shape[1] == seen)}"
        )


def check_text(given: Given, cache: EvictingCache) -> str | None:
    """Compare the text that generate() is given with what its cache has read, for `_run_with_cache`.

    It may be the whole text, or only new tokens, under a mask of the whole text (`given.alone`).

    Returns the reason that some tokens cannot be compared, or None.

    Raises:
        KVPatchError: the text is another one, or brings nothing new.
    """
    seen = given.columns_read
    if given.columns is None or not seen:
        return None
    name = "inputs_embeds" if given.ids is None else "input_ids"
    if not given.alone and seen >= given.columns:
        or_new = f", or what is new alone with an attention_mask of {seen + given.columns} columns over both"
        raise KVPatchError(
            f"{name} have {given.columns} columns, but the cache has read {seen} tokens: give the whole text so far with "
            f"what is new at its end{or_new if given.ids is not None else ''}. {ANEW}"
        )
    if cache.settings.transparent:  # policy "full"
        return None  # any text may go on, as with the unpatched model
    known_BT = cache.ids.ids_BT
    if known_BT is None or known_BT.shape[1] < seen:
        return "the cache does not know the ids of what it has read"
    if given.ids is not None and not given.alone:
        _check_ids(given.ids[:, :seen].to(known_BT.device), known_BT)
    if given.mask is not None:
        _check_padding(given.mask[:, :seen], known_BT)
    if given.ids is None:
        return "inputs_embeds have no token ids"
    unknown = not given.alone and bool((known_BT == UNKNOWN).any())  # tokens that were read as embeddings
    return "some of what the cache has read came without token ids" if unknown else None


def _check_ids(ids_BT: Tensor, known_BT: Tensor) -> None:
    """Raise KVPatchError, for `check_text`, if token ids differ from those that the cache has read in the same columns."""
    given_BT = _rows_like(ids_BT, known_BT)
    if given_BT is None:
        return  # another batch, which the pass refuses
    wrong_BT = (given_BT != known_BT) & (known_BT >= 0)
    if bool(wrong_BT.any()):
        row, column = wrong_BT.nonzero()[0].tolist()
        raise KVPatchError(
            f"input_ids differ from what the cache has read at column {column} of row {row}: it has read another text, such as "
            f"an earlier question, or a turn that was edited since. {ANEW}"
        )


def _rows_like(given_BT: Tensor, known_BT: Tensor) -> Tensor | None:
    """Repeat given rows (ids or a mask) for their beams, to compare them in `_check_ids` and `_check_padding` with a cache's.

    One row in the cache is compared with all. None if the cache's rows are no multiple of those given.
    """
    beams = len(known_BT) // max(len(given_BT), 1)
    if len(known_BT) == 1:
        return given_BT  # of a prefix, which all rows begin with
    return given_BT.repeat_interleave(beams, 0) if beams and beams * len(given_BT) == len(known_BT) else None


def check_seen_mask(mask_BT: Tensor, cache: EvictingCache, Q: int) -> None:
    """Raise KVPatchError, for `_check_batch`, if a pass's mask contradicts the padding that its cache knows it has read.

    Q: columns of the pass. Before the last edit (`columns_at_edit`) the mask may have 0 where the cache has read a token.
    """
    known_BT, seen = cache.ids.ids_BT, cache.get_seq_length()
    # joined rows, of caches of different lengths, have no columns in common with a mask
    if known_BT is None or known_BT.shape[1] != seen or mask_BT.shape[1] != seen + Q or cache.rows.concatenated:
        return
    _check_padding(mask_BT[:, :seen], known_BT, cache.rows.columns_at_edit)


def _check_padding(mask_BT: Tensor, known_BT: Tensor, edited: int = 0) -> None:
    """Raise KVPatchError if a mask has 0 where the cache has read a token, or 1 for padding.

    `check_text` calls it before generate(), `check_seen_mask` before a pass. known_BT: ids that the cache has read, PADDING or
    UNKNOWN. edited: in so many first columns 0 is allowed, since forget() may have removed the token.
    """
    real_BT = _rows_like(mask_BT.to(known_BT.device).bool(), known_BT)
    if real_BT is None:
        return
    # 1 where padding was read, or 0 where a token was; a token without a known id is a token
    wrong_BT = (real_BT == (known_BT == PADDING)) & ((known_BT != UNKNOWN) | ~real_BT)
    wrong_BT[:, :edited] &= real_BT[:, :edited]  # there only 1 for padding is wrong
    if not bool(wrong_BT.any()):
        return
    row, column = wrong_BT.nonzero()[0].tolist()
    cache_row = min(row, len(known_BT) - 1)
    known_T = known_BT[cache_row]
    there, here = ("padding", "a token") if known_T[column] == PADDING else ("a token", "padding")
    position = int((known_T[:column] != PADDING).sum())
    take_out = f"cache.forget([({position}, {position + 1})], row={cache_row}) takes that token out. " * (here == "padding")
    if known_T[column] == UNKNOWN:  # of a converted cache
        take_out = "Of a cache that was converted, patch.compress(past, attention_mask=...) says what is padding. "
    raise KVPatchError(
        f"attention_mask has {here} at column {column} of row {row}, where the cache has read {there}: give the mask of the "
        "text that it has read, with ones for what was generated, after an early end too (without a mask generate() takes pad "
        f"tokens for padding). {take_out}{ANEW}"
    )
