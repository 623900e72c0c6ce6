"""Attention against PyTorch's own, and the bookkeeping of tokens that are named by an index."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rdvit.models.attention import Attention, KeptAttention, attention, gather_tokens, scatter_tokens


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_agrees_with_torch_multi_head_attention(qkv_bias: bool) -> None:
    torch.manual_seed(0)
    attention, x_BND = Attention(24, 3, qkv_bias), torch.randn(2, 7, 24)
    x_NBD = x_BND.transpose(0, 1)
    weights = attention.qkv.weight, attention.qkv.bias
    proj = attention.proj.weight, attention.proj.bias
    theirs_NBD, _ = F.multi_head_attention_forward(x_NBD, x_NBD, x_NBD, 24, 3, *weights, None, None, False, 0.0, *proj)
    torch.testing.assert_close(attention(x_BND), theirs_NBD.transpose(0, 1))


def test_a_query_gets_the_same_answer_alone_and_among_others() -> None:
    torch.manual_seed(0)
    attention, x_BND = Attention(16, 4), torch.randn(2, 9, 16)
    q, k, v = attention.project(x_BND)
    assert q.shape == k.shape == v.shape == (2, 4, 9, 4)
    torch.testing.assert_close(attention.attend(q[:, :, 3:5], k, v), attention(x_BND)[:, 3:5])


def test_attention_that_keeps_its_weights_has_the_true_gradient() -> None:
    torch.manual_seed(0)
    shapes = ((2, 3, 4), (2, 5, 4), (2, 5, 4))  # three queries, five keys
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(KeptAttention.apply, inputs)
    torch.testing.assert_close(KeptAttention.apply(*inputs), F.scaled_dot_product_attention(*inputs))


def test_training_in_bfloat16_gives_the_answer_and_gradient_of_float32() -> None:
    torch.manual_seed(0)
    exact = [torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    y_BHMK = attention(*rounded)
    assert y_BHMK.grad_fn is not None and "KeptAttention" in str(y_BHMK.grad_fn.next_functions)
    expected_BHMK = F.scaled_dot_product_attention(*exact)
    torch.testing.assert_close(y_BHMK.float(), expected_BHMK, atol=0.03, rtol=0.02)
    y_BHMK.float().square().sum().backward()
    expected_BHMK.square().sum().backward()
    for x, e in zip(rounded, exact, strict=True):
        assert x.grad is not None and e.grad is not None
        assert (x.grad.float() - e.grad).norm() < 0.02 * e.grad.norm()


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="5 heads for width 32"):
        Attention(32, 5)


def test_gather_and_scatter_name_the_same_tokens() -> None:
    torch.manual_seed(0)
    x_BND, index_BM = torch.randn(2, 5, 3), torch.tensor([[4, 0], [1, 3]])
    taken_BMD = gather_tokens(x_BND, index_BM)
    assert torch.equal(taken_BMD[0], x_BND[0, [4, 0]])
    assert torch.equal(taken_BMD[1], x_BND[1, [1, 3]])
    assert torch.equal(scatter_tokens(x_BND, index_BM, taken_BMD), x_BND)


def test_scatter_replaces_the_named_tokens_in_a_copy() -> None:
    x_BND, index_BM = torch.zeros(1, 4, 2), torch.tensor([[2, 0]])
    new_BND = scatter_tokens(x_BND, index_BM, torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64))
    assert new_BND.tolist() == [[[3, 4], [0, 0], [1, 2], [0, 0]]]
    assert new_BND.dtype == torch.float32
    assert not x_BND.any()
