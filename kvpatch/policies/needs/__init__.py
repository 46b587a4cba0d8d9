"""Needs: what scores and scopes read besides positions and entries of their own, one small frozen class per need.

| need | context.view(it) | also |
|---|---|---|
| Sums(key) | a statistic summed over all rows [B,H,T] | context.state[key] |
| NoisySums | Keyformer's sum [B,H,T] | context.state["gumbel"] |
| WindowAttention(width) | attention of the last rows [B,H,T] | context.state["observed"] |
| LastUses(alpha) | the same | context.state["last_use"], context.state["interval"] |
| LastQueries(width) | LastLogits: logits of the last queries | |
| QueryMoments(future) | Queries: distribution of the coming ones | |
| ChunkAttention(size) | attention inside a token's chunk [B,H,T] | context.state["local"] |
| Held() | keys and values [B,H,T,D] | |
| PlainKeys() | keys without their rotation [B,H,T,D] | |
| SecondReading() | attention of a second reading [B,H,T] | context.state["repeated"] |
| RepeatQueries() | | queries of a second reading, for a Merging |
| Calibrated(names) | | the score's own `calibration` |

A need has one life, which attention/ calls for all alike: `entry` when tokens enter the cache, `read` when a prompt (or a
piece of it) has attended, `step` when a decode step has, `view` when a score asks, `end` when a prompt's tokens are evicted.
What it keeps of a token is in the layer's state; what it keeps of a layer is a Note, which moves, is copied, joined, saved and
taken back with the layer's rows.
"""

from .base import AnyNeed, LayerRead, Need, Note, PromptRead, StepRead
from .calibrated import Calibrated
from .chunk_attention import ChunkAttention
from .declared import Needs
from .held import Held, PlainKeys
from .last_queries import LastLogits, LastQueries
from .last_uses import LastUses
from .noisy_sums import NoisySums
from .query_moments import Queries, QueryMoments
from .second_reading import RepeatQueries, SecondReading
from .sums import Sums
from .window_attention import WindowAttention

__all__ = [
    "AnyNeed",
    "Calibrated",
    "ChunkAttention",
    "Held",
    "LastLogits",
    "LastQueries",
    "LastUses",
    "LayerRead",
    "Need",
    "Needs",
    "NoisySums",
    "Note",
    "PlainKeys",
    "PromptRead",
    "Queries",
    "QueryMoments",
    "RepeatQueries",
    "SecondReading",
    "StepRead",
    "Sums",
    "WindowAttention",
]
