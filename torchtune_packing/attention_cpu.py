"""Exact attention over the documents of a packed batch, on the CPU.

torch has no variable-length kernel for the CPU, but it has a fused causal one, forward and
backward. Here it is called once per document, on views into the packed tensors:

    tokens   [ A A A A | B B | C C C | . . ]        three documents and a padding tail
    calls      A x A     B x B  C x C               cost: sum of len^2, nothing for what is padding

* Grouped-query heads are not copied: the key/value heads play the part of the batch, the heads of
  a group play the part of the heads, and keys and values are expanded over the group with stride 0.
* bfloat16 and float16 are computed in float32, one document at a time, and rounded once at the
  end. torch's own CPU backward for bfloat16 multiplies with a matrix product that is about eight
  times slower than the float32 one on processors without bfloat16 instructions, and rounds the
  probabilities besides.
* Both directions are custom operators: compilers see one node whose inputs have fixed shapes, and
  never the loop over documents, so another number of documents compiles nothing again.
"""

import torch

__all__ = ["document_attention_cpu"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_group(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Views ``[n, h, dh]`` as ``[kv heads, h / kv heads, n, dh]``."""
    return x.transpose(0, 1).unflatten(0, (num_kv_heads, -1))


def _documents(spans: torch.Tensor) -> list[tuple[int, int]]:
    starts, lengths = spans.tolist()
    return [(t, n) for t, n in zip(starts, lengths, strict=True) if n > 0]


@torch.library.custom_op("torchtune_packing::document_attention_cpu", mutates_args=())
def _document_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[b, s, h, dh]`` and the log-sum-exp, the latter document by document in one line."""
    b, s, h, dh = q.shape
    num_kv_heads = k.shape[2]
    group = h // num_kv_heads
    compute = _compute_dtype(q.dtype)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.zeros(b * s * h, dtype=compute)
    rows_q, rows_k, rows_v = q.reshape(b * s, h, dh), k.flatten(0, 1), v.flatten(0, 1)
    rows_out = out.view(b * s, h, dh)
    for t, n in _documents(spans):
        one_q = _by_group(rows_q[t : t + n].to(compute), num_kv_heads)
        one_k = _by_group(rows_k[t : t + n].to(compute), num_kv_heads).expand(-1, group, -1, -1)
        one_v = _by_group(rows_v[t : t + n].to(compute), num_kv_heads).expand(-1, group, -1, -1)
        one_out, one_lse = _flash_forward(one_q, one_k, one_v, 0.0, True)
        _by_group(rows_out[t : t + n], num_kv_heads).copy_(one_out)
        lse[t * h : (t + n) * h].view_as(one_lse).copy_(one_lse)
    return out, lse


@_document_attention.register_fake
def _(q, k, v, spans):  # type: ignore[no-untyped-def]
    lse = q.new_empty(q.shape[0] * q.shape[1] * q.shape[2], dtype=_compute_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("torchtune_packing::document_attention_cpu_backward", mutates_args=())
def _document_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; zero where no document lies."""
    b, s, h, dh = q.shape
    num_kv_heads = k.shape[2]
    group = h // num_kv_heads
    compute = _compute_dtype(q.dtype)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.zeros_like(k, memory_format=torch.contiguous_format)
    grad_v = torch.zeros_like(v, memory_format=torch.contiguous_format)
    rows = [x.reshape(b * s, x.shape[2], dh) for x in (grad, q, k, v, out)]
    rows_grad_q, rows_grad_k, rows_grad_v = (
        x.view(b * s, -1, dh) for x in (grad_q, grad_k, grad_v)
    )
    for t, n in _documents(spans):
        one_grad, one_q, one_k, one_v, one_out = (
            _by_group(x[t : t + n].to(compute), num_kv_heads) for x in rows
        )
        one_lse = lse[t * h : (t + n) * h].view(num_kv_heads, group, n)
        one_grad_q, one_grad_k, one_grad_v = _flash_backward(
            one_grad,
            one_q,
            one_k.expand(-1, group, -1, -1),
            one_v.expand(-1, group, -1, -1),
            one_out,
            one_lse,
            0.0,
            True,
        )
        _by_group(rows_grad_q[t : t + n], num_kv_heads).copy_(one_grad_q)
        rows_grad_k[t : t + n].transpose(0, 1).copy_(one_grad_k.sum(1))
        rows_grad_v[t : t + n].transpose(0, 1).copy_(one_grad_v.sum(1))
    return grad_q, grad_k, grad_v


@_document_attention_backward.register_fake
def _(grad, q, k, v, out, lse, spans):  # type: ignore[no-untyped-def]
    contiguous = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=contiguous) for x in (q, k, v))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, spans = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, spans)


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, spans = ctx.saved_tensors
    return *_document_attention_backward(grad, q, k, v, out, lse, spans), None


_document_attention.register_autograd(_differentiate, setup_context=_save)


def document_attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Causal attention of every document to itself.

    Args:
        q: float ``[b, s, h, head_dim]``.
        k: float ``[b, s, kv heads, head_dim]``; h is a multiple of the kv heads.
        v: float ``[b, s, kv heads, head_dim]``.
        spans: int32 ``[2, slots]`` on the CPU: first token and length of each document over all
            rows laid end to end (see ``DocumentLayout``).

    Returns:
        float ``[b, s, h, head_dim]`` in q's dtype; zero at positions that no span covers.
    """
    out: torch.Tensor = _document_attention(q, k, v, spans)[0]
    return out
