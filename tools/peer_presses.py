"""Every press of NVIDIA kvpress 0.5.5 and what kvpatch has for it: the table of docs/peers.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Press:
    """What kvpatch has for one press.

    Attributes:
        row: name of the policy that is the press.
        call: arguments of `patched(model, ...)` that make it of other parts.
        note: what differs; or, with neither, why there is nothing.
    """

    row: str = ""
    call: str = ""
    note: str = ""


_TRAINED = "weights that others have trained for a few models, which this library does not load"

PRESSES = {
    "AdaKVPress": Press(row="adakv", note="around any score: `kvpatch.adaptive(base)`; what it evicts is freed"),
    "BlockPress": Press(call='"key_diff", k=512, block=256', note="any policy; the budget holds while the prompt is read"),
    "CAMPress": Press(
        note="It merges values by chance into the tokens that follow; `kvpatch.merged` merges by likeness, at a prompt's end."
    ),
    "CapPress": Press(note="No policy has its score, a log-determinant of values weighted by a mean query."),
    "ChunkKVPress": Press(row="chunk_kv", note="around any score: `kvpatch.chunked(base)`; the budget is exact"),
    "ChunkPress": Press(note="It gives each chunk of the text a budget of its own; here all tokens of a head compete."),
    "CompactorPress": Press(row="compactor", note="`blend` is a number, not the share of tokens that go"),
    "ComposedPress": Press(note="Two presses in a row keep what nobody asked for; here parts of policies combine."),
    "CompressionRatioDecodingPress": Press(call='"h2o", k=kvpatch.Share(0.5)', note="any policy that evicts while decoding"),
    "CriticalAdaKVPress": Press(row="critical_adakv", note="around any weight: `kvpatch.critical(kvpatch.adaptive(base))`"),
    "CriticalKVPress": Press(row="critical_snapkv", note="around any weight: `kvpatch.critical(base)`"),
    "CURPress": Press(row="cur"),
    "DecodingPress": Press(
        call='"key_diff", k=2048, schedule="decode", every=512',
        note="any score that generated tokens have; `k` counts them alone",
    ),
    "DMSPress": Press(call='"h2o", k=kvpatch.Threshold(0.01), recent=128', note="any weight; what it evicts is freed"),
    "DuoAttentionPress": Press(
        row="duo",
        note="`kvpatch calibrate` measures the heads on the user's text; what heads evict is freed, while decoding too",
    ),
    "EntropyGatedChunkKVPress": Press(note="`kvpatch.chunked` has no chunks of which a part is kept but the last."),
    "ExpectedAttentionPress": Press(row="expected_attention"),
    "ExpectedAttentionStatsPress": Press(
        note="It needs statistics of other texts; `expected_attention` takes them from the prompt."
    ),
    "FastKVzipPress": Press(note=f"It needs {_TRAINED}."),
    "FinchPress": Press(
        call='"snapkv", k=0.5, window=32, kernel=1, pooling=None, positions="renumbered"',
        note="the window is as long as the question; as its `normalize_scores=False`, without chunks",
    ),
    "KeyDiffPress": Press(row="key_diff", note="while decoding too"),
    "KeyRerotationPress": Press(
        call='"streaming_llm", k=0.5, positions="renumbered"', note="any policy that does not undo rotations"
    ),
    "KnormPress": Press(row="key_norm", note="while decoding too"),
    "KVComposePress": Press(note="It joins tokens of different heads into one; an entry here is one token's."),
    "KVgradPress": Press(note="It needs a backward pass of the second reading; reading here leaves no graph."),
    "KVzapPress": Press(
        row="learned", note="`kvpatch learn` fits it to the user's text, of values instead of hidden states; no trained weights"
    ),
    "KVzipPress": Press(row="kvzip", note="or [kvzip_plus](policies/kvzip_plus.md); what is evicted is freed"),
    "LagKVPress": Press(row="lag_kv"),
    "LeverageScorePress": Press(row="leverage", note="scores are not standardized, which changes no ranking"),
    "LUKVPress": Press(
        call='"snapkv", k=[[0.3, 0.6], [0.5, 0.4]]', note="a share for each layer and head; its tables are not shipped"
    ),
    "MergingPress": Press(call='"merged(snapkv)", k=0.5', note="around any score: `kvpatch.merged(base)`; no `merge_fraction`"),
    "NonCausalAttnPress": Press(call='"compactor", k=0.5, blend=0, sinks=0, recent=0', note="scores plus zero times leverage"),
    "ObservedAttentionPress": Press(
        call='"roco", k=0.5, recent=0, protected=0, schedule="prompt"',
        note="without eager attention or a matrix of all rows",
    ),
    "PerLayerCompressionPress": Press(call='"snapkv", k=[0.5, 0.3]', note="one budget for each layer of the model; any policy"),
    "PrefillDecodingPress": Press(call='"h2o", k=0.5, schedule="both"', note="one policy for both phases"),
    "PyramidKVPress": Press(row="pyramidkv", note="around any score: `kvpatch.pyramid(base)`; the total is exact"),
    "QFilterPress": Press(row="q_filter", note="`kvpatch calibrate` measures the directions on the user's text"),
    "RandomPress": Press(row="random", note="while decoding too"),
    "RestoreKVPress": Press(note=f"It needs {_TRAINED}."),
    "SimLayerKVPress": Press(note="It decides layer by layer to keep all or little; a budget here is given, not found."),
    "SnapKVPress": Press(row="snapkv", note='its defaults are `window=64, kernel=5, pooling="avg"`'),
    "StreamingLLMPress": Press(row="streaming_llm", note="while decoding too"),
    "ThinKPress": Press(note="It sets channels of keys to zero, which frees nothing; `bits=8` makes entries smaller."),
    "TOVAPress": Press(row="tova", note="while decoding too; the newest token stays there, as with `recent=1`"),
}


def counts() -> tuple[int, int, int]:
    """Return how many presses are rows, how many are options, and how many are neither."""
    rows, calls = (sum(bool(getattr(press, name)) for press in PRESSES.values()) for name in ("row", "call"))
    return rows, calls, len(PRESSES) - rows - calls


def table() -> tuple[tuple[str, str, str], ...]:
    """Return the rows of the table: press, what it is here, and a note."""

    def here(press: Press) -> str:
        if press.row:
            return f"row [{press.row}](policies/{press.row}.md)"
        return f"option `{press.call}`" if press.call else "none"

    return tuple((f"`{name}`", here(PRESSES[name]), PRESSES[name].note) for name in sorted(PRESSES, key=str.lower))


def summary() -> str:
    """Return the count in one sentence."""
    rows, calls, none = counts()
    return f"Of its {len(PRESSES)} presses {rows} are policies here, {calls} are options, and {none} have nothing like them."
