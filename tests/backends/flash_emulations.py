"""Emulations of flash-attention functions and operators.

Each has the real function's signature, refuses what that refuses, and computes in float64 what it would.
"""

import importlib.machinery
import inspect
import types

import torch

from kvpatch.backends.flash import flash_backend


def one_sequence(q_SND, k_TMD, v_TMD, scale, left, right, slopes, empty):
    """Query row i stands at column i + T - S; -1: no limit on that side. Returns [S,N,D] and [N,S]."""
    S, N, T = q_SND.shape[0], q_SND.shape[1], k_TMD.shape[0]
    k, v = (t.double().repeat_interleave(N // t.shape[1], 1) for t in (k_TMD, v_TMD))
    x = torch.einsum("snd,tnd->nst", q_SND.double(), k) * scale
    row, column = torch.arange(S)[:, None] + T - S, torch.arange(T)
    if slopes is not None:
        causal = left < 0 and right == 0
        distance = column.expand(S, T) if causal else -(row - column).abs()  # flash_attn 2's mask.h
        x = x + slopes.double()[:, None, None] * distance
    hidden = torch.zeros(S, T, dtype=torch.bool)
    hidden |= (column > row + right) if right >= 0 else False
    hidden |= (column < row - left) if left >= 0 else False
    x = x.masked_fill(hidden, -torch.inf)
    out = torch.einsum("nst,tnd->snd", x.softmax(-1).nan_to_num(), v)
    lse = x.logsumexp(-1)
    return out.to(q_SND.dtype), lse.masked_fill(lse == -torch.inf, empty).float()


def sequences(q, k, v, starts_q, starts_k, used, scale, left, right, slopes, empty):
    """`one_sequence` over dense tensors (starts None) or over packed ones; rows that no sequence has stay NaN."""
    if starts_q is None:
        pairs = [one_sequence(*row, scale, left, right, slopes, empty) for row in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])
    outs, lses = [], []
    for i in range(len(starts_q) - 1):
        begin = int(starts_k[i])
        end = int(starts_k[i + 1]) if used is None else begin + int(used[i])
        part = q[starts_q[i] : starts_q[i + 1]], k[begin:end], v[begin:end]
        out, lse = one_sequence(*part, scale, left, right, slopes, empty)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def contract(q, k, v, starts_q, starts_k, longest_q, longest_k, used=None):
    """What all of them ask of tensors."""
    D = q.shape[-1]
    assert q.dtype in flash_backend.HALVES and k.dtype == v.dtype == q.dtype, "FlashAttention only support fp16 and bf16"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert D <= 256 and D % 8 == 0, "head dimension at most 256, a multiple of 8"
    assert q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query"
    assert q.ndim == k.ndim == v.ndim == (4 if starts_q is None else 3)
    if starts_q is None:
        return
    assert starts_q.dtype == starts_k.dtype == torch.int32 and starts_q.shape == starts_k.shape
    assert starts_q.is_contiguous() and starts_k.is_contiguous()
    assert int(starts_q[0]) == 0 and int(starts_q[-1]) == len(q) and int(starts_q.diff().max()) == longest_q
    assert int(starts_q.diff().min()) > 0 or longest_q > 1, "a single token each: the rows are reshaped to the batch"
    if used is None:
        assert int(starts_k[-1]) == len(k) and int(starts_k.diff().max()) == longest_k
    else:
        assert used.dtype == torch.int32 and used.is_contiguous() and used.shape == (len(starts_k) - 1,)
        assert bool((starts_k[:-1] + used <= starts_k[1:]).all()) and int(used.max()) <= longest_k


def flash_attn_2():
    def run(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout_p, scale, causal, window, alibi, deterministic, probs):
        contract(q, k, v, starts_q, starts_k, longest_q, longest_k)
        assert dropout_p == 0.0 and probs and deterministic
        left, right = (-1 if side >= longest_k else side for side in window)
        right = 0 if causal and (longest_q > 1 or alibi is not None) else right
        if alibi is not None:
            assert alibi.dtype == torch.float32 and alibi.shape == (q.shape[-2],) and alibi.stride(-1) == 1
        out, lse = sequences(q, k, v, starts_q, starts_k, None, scale, left, right, alibi, torch.inf)
        return out, lse, torch.empty(0)

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        return run(
            q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size, alibi_slopes,
            deterministic, return_attn_probs,
        )  # fmt: skip

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        return run(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
            alibi_slopes, deterministic, return_attn_probs,
        )  # fmt: skip

    return module("flash_attn", flash_attn_func, flash_attn_varlen_func, __version__="2.8.3", __path__=[])


def cute():
    def run(q, k, v, starts_q, starts_k, longest_q, longest_k, used, scale, causal, window, return_lse):
        contract(q, k, v, starts_q, starts_k, longest_q, longest_k, used)
        left, right = window
        if left is not None and right is not None and left < 0 and right < 0:
            left = right = None
        right = 0 if causal else right
        assert left is None or left >= 0
        left, right = (-1 if side is None else side for side in (left, right))
        out, lse = sequences(q, k, v, starts_q, starts_k, used, scale, left, right, None, -torch.inf)
        return out, lse if return_lse or q.requires_grad else None

    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
        block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        assert deterministic
        return run(q, k, v, None, None, None, None, None, softmax_scale, causal, window_size, return_lse)

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
        seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
        return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
        gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        return run(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, softmax_scale, causal, window_size,
            return_lse,
        )  # fmt: skip

    return module("flash_attn.cute", flash_attn_func, flash_attn_varlen_func, __version__="0.0.0")


def operator(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    """aten::_flash_attention_forward."""
    if alibi_slopes is not None:
        raise RuntimeError("This flash attention build does not support alibi.")
    contract(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k)
    if cum_seq_q is None:
        assert (max_q, max_k) == (query.shape[1], key.shape[1])
    assert dropout_p == 0.0 and not return_debug_mask
    left, right = (-1 if side is None or side >= max_k else side for side in (window_size_left, window_size_right))
    right = 0 if is_causal and max_q > 1 else right
    found = sequences(query, key, value, cum_seq_q, cum_seq_k, seqused_k, scale, left, right, None, torch.inf)
    return *found, None, None, None


def three(asks="return_attn_probs"):
    """flash-attn 3: hopper/flash_attn_interface.py; without `asks`, as vLLM builds it, where the log-sum-exp always returns."""

    def run(q, k, v, starts_q, starts_k, longest_q, longest_k, used, scale, causal, window, deterministic, probs):
        contract(q, k, v, starts_q, starts_k, longest_q, longest_k, used)
        left, right = (-1 if side >= (longest_k or k.shape[1]) - 1 else side for side in window)
        right = 0 if causal else right
        assert right == 0 or longest_q == 1
        out, lse = sequences(q, k, v, starts_q, starts_k, used, scale, left, right, None, torch.inf)
        return (out, lse) if probs else out

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
        return_attn_probs=False,
    ):  # fmt: skip
        assert deterministic
        return run(q, k, v, None, None, None, None, None, softmax_scale, causal, window_size, deterministic, return_attn_probs)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
        causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        return run(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, softmax_scale, causal, window_size,
            deterministic, return_attn_probs,
        )  # fmt: skip

    if asks is not None:
        return module("flash_attn_interface", flash_attn_func, flash_attn_varlen_func)

    def with_sinks(function, names):
        def call(*args, **kwargs):
            assert "return_attn_probs" not in kwargs and "attention_chunk" not in kwargs
            return function(*args, return_attn_probs=True, **kwargs)

        parameters = [p for n, p in inspect.signature(function).parameters.items() if n not in names]
        parameters += [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
            for n in ("s_aux", "cp_world_size", "cp_rank", "cp_tot_seqused_k")
        ]
        call.__signature__, call.__name__ = inspect.Signature(parameters), function.__name__
        return call

    both = (with_sinks(f, ("return_attn_probs", "attention_chunk")) for f in (flash_attn_func, flash_attn_varlen_func))
    return module("vllm_flash_attn3", *both)


FWD = (  # hopper/flash_api.cpp
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)


def fwd(*args):
    """flash_attn_3::fwd with the arguments of FWD, in their order."""
    names = [part.split("=")[0].split()[-1] for part in FWD[4 : FWD.index(") ->")].split(", ")]
    given = dict(zip(names, args, strict=False))
    q, k, v = given["q"], given["k"], given["v"]
    starts, longest = (given[f"cu_seqlens_{side}"] for side in "qk"), (given[f"max_seqlen_{side}"] for side in "qk")
    starts_q, starts_k = starts
    contract(q, k, v, starts_q, starts_k, *longest)
    assert given["is_causal"] and given["num_splits"] == 1, "splits are merged by a further kernel"
    left = given["window_size_left"]
    found = sequences(q, k, v, starts_q, starts_k, None, given["softmax_scale"], left, 0, None, torch.inf)
    return *found, torch.empty(0), torch.empty(0)


def cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    """aten::_scaled_dot_product_cudnn_attention: heads before rows, and a causal mask that begins at the first key."""
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and is_causal and not return_debug_mask
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    contract(q, k, v, None, None, None, None)
    assert q.shape[-1] <= 128 and q.shape[1] == k.shape[1] > 1
    out, lse = sequences(q, k, v, None, None, None, scale, -1, 0, None, torch.inf)
    return out.transpose(1, 2), lse[..., None], None, None, q.shape[1], k.shape[1], None, None, None


operator.default = torch.ops.aten._flash_attention_forward.default  # for its schema


def module(name, *functions, **attributes):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for function in functions:
        setattr(made, function.__name__, function)
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def hub(modules):
    """The package `kernels` with these kernels of the Hugging Face hub loaded, by repository."""
    loaded = [types.SimpleNamespace(module=m, repo_info=types.SimpleNamespace(repo_id=name)) for name, m in modules.items()]
    return types.SimpleNamespace(get_loaded_kernels=lambda: loaded)
