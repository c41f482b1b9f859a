"""The assertions about bits."""

import math

import ml_dtypes
import numpy
import pytest
import torch
from conftest import floats
from samebits.testing import assert_on_policy, assert_same_bits


def fails(words, *args, error=AssertionError, call=assert_same_bits):
    with pytest.raises(error) as caught:
        call(*args)
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "uint8", "bool"])
def test_equal_bits_pass(dtype):
    x = floats((3, 5), "float32", 1).to(getattr(torch, dtype))
    assert_same_bits(x, x.clone())
    assert_same_bits(x.t(), x.t().contiguous())
    assert_same_bits(x[0, 0], x[0, 0].clone())


def test_numpy_and_torch_are_compared():
    x = floats((3, 5), "bfloat16", 1)
    assert_same_bits(x, x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    assert_same_bits(x.float(), x.float().numpy())
    assert_same_bits(numpy.float32(1.5), numpy.ones((), numpy.float32) * numpy.float32(1.5))


def test_the_message_names_index_bits_and_count():
    a = torch.ones(2, 3)
    b = a.clone()
    b[1, 0], b[1, 2] = 1 + 2**-23, 2
    fails(
        "2 of 6 elements differ in float32, first at [1, 0]: 0x3f800000 (1.0) in the first, "
        "0x3f800001 (1.0000001192092896) in the second",
        a,
        b,
    )
    with pytest.raises(AssertionError, match="^logits: 2 of 6"):
        assert_same_bits(a, b, "logits")


def test_zeros_and_nans_are_told_apart():
    fails("1 of 1 elements differ in float32, first at [0]: 0x00000000 (0.0)", torch.zeros(1), -torch.zeros(1))
    fails("0x8000 (-0.0) in the second", torch.zeros(1).bfloat16(), -torch.zeros(1).bfloat16())
    nan = torch.tensor([math.nan])
    assert_same_bits(nan, nan.clone())
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    fails("0x7fc00000 (nan) in the first, 0x7fc00001 (nan) in the second", nan, other)


def test_what_cannot_be_equal_fails():
    fails("the first is float32, the second is bfloat16", torch.ones(1), torch.ones(1).bfloat16())
    fails("the first has shape [2], the second has [1, 2]", torch.ones(2), torch.ones(1, 2))
    fails("no elements; nothing would be compared", torch.ones(0), torch.ones(0))
    fails("the first: it is a list", [1.0], [1.0], error=TypeError)
    fails("elements of torch.complex64", torch.ones(1, dtype=torch.complex64), torch.ones(1), error=TypeError)
    fails("elements of complex128", numpy.ones(1, complex), numpy.ones(1, complex), error=TypeError)


def logprobs():
    return -floats((2, 4), "float32", 3).abs() - 0.1


def on_policy(words, *args, error=AssertionError):
    fails(words, *args, error=error, call=assert_on_policy)


def test_on_policy():
    a, b, c = logprobs(), logprobs(), logprobs().requires_grad_()
    assert assert_on_policy(a, b, c) == 8
    # One of numpy: the engine's, and what is masked out may be anything.
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1]])
    b[0, 2], a[1, 0] = math.nan, 7
    assert assert_on_policy(a.numpy(), b, c * 1, mask) == 5
    assert assert_on_policy(a, b, c.detach().clone(), mask.bool()) == 5
    # Three slices of one tensor are three.
    one = torch.stack([logprobs()] * 3, -1)
    assert assert_on_policy(one[..., 0], one[..., 1], one[..., 2]) == 8


def test_what_is_off_policy_fails():
    a, b, c = logprobs(), logprobs(), logprobs()
    c[1, 3] = torch.nextafter(c[1, 3], torch.tensor(0.0))
    on_policy("1 of 8 elements differ in float32, first at [1, 3]", a, b, c)
    on_policy("in recomputed,", a, b, c)
    on_policy("no token is active", a, b, logprobs(), torch.zeros(2, 4))
    for tensor in (a, b, c):
        tensor[0, 1] = -math.inf
    c[1, 3] = a[1, 3]
    on_policy("1 of 8 active log-probabilities are not finite, first at [0, 1]", a, b, c)


def test_what_would_show_nothing_is_refused():
    a, b, c = logprobs(), logprobs(), logprobs().requires_grad_()
    refused = lambda words, *args: on_policy(words, *args, error=ValueError)
    refused("recomputed and first_train_forward are one tensor", a, c.detach(), c)
    refused("recomputed and first_train_forward are one tensor", a, c, c)
    refused("rollout_logprobs and recomputed are one tensor", a, a.view(2, 4), c)
    refused("rollout_logprobs and recomputed are one tensor", a.numpy(), a, c)
    forward = c * 1
    refused("recomputed and first_train_forward come from one forward", a, forward.clone(), forward)
    refused("1.0 is no log-probability", torch.ones(2), torch.ones(2), torch.ones(2))
    refused("all active log-probabilities are 0", torch.zeros(2), torch.zeros(2), torch.zeros(2))
    refused("mask has shape [4], rollout_logprobs has [2, 4]", a, b, c, torch.ones(4))
    on_policy("recomputed: its dtype is int32", a, b.int(), c, error=TypeError)
