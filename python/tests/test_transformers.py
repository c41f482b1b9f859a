"""Models of transformers, as they are: the same bits for any batch, padding, number of threads, prefill or decode."""

import contextlib

import pytest
import samebits.torch
import torch
from conftest import same

transformers = pytest.importorskip("transformers", reason="transformers is not installed: ci/python installs it")
transformers.logging.set_verbosity_error()

VOCABULARY, LENGTH, BATCH = 97, 21, 33
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Gemma2", "Mixtral"]
DTYPES = ["float32", "bfloat16"]
OWN = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
    # A window that some keys are behind, and the soft caps of the family.
    "Gemma2": {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "pad_token_id": 0},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def made(family, dtype, **own):
    if dtype == "float64" and family == "Mixtral":
        # torch groups no products in fp64.
        own["experts_implementation"] = "eager"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=200, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, **OWN.get(family, {}), **own,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights of norms and biases that matter, and logits that are no small numbers.
            parameter.mul_(2).add_(0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
    return model.to(getattr(torch, dtype)).eval()


def tokens():
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def prefill(model, rows, left=0, right=0):
    """Logits of these sequences, padded on either side."""
    mask = torch.nn.functional.pad(torch.ones_like(rows), (left, right))
    place = (mask.cumsum(-1) - 1).clamp(min=0)
    rows = torch.nn.functional.pad(rows, (left, right))
    return model(rows, attention_mask=mask, position_ids=place).logits[:, left : left + LENGTH]


@torch.no_grad()
def decode(model, rows, first=5):
    made = model(rows[:, :first], use_cache=True)
    logits = [made.logits]
    for t in range(first, LENGTH):
        made = model(rows[:, t : t + 1], past_key_values=made.past_key_values, use_cache=True)
        logits.append(made.logits)
    return torch.cat(logits, 1)


def differing(model):
    """In what the logits of the first sequence differ from those that it has alone."""
    rows, threads = tokens(), torch.get_num_threads()
    alone = prefill(model, rows[:1])
    found = {}
    for count, at, left, right in ((1, 0, 6, 0), (1, 0, 0, 6), (2, 1, 0, 0), (7, 3, 6, 0), (8, 0, 0, 6), (BATCH, BATCH - 1, 0, 0)):
        batch = torch.cat([rows[1 : 1 + at], rows[:1], rows[1 + at : count]])
        found[f"row {at} of {count}, padded {left} {right}"] = prefill(model, batch, left, right)[at : at + 1]
    found["decode"] = decode(model, rows[:1], LENGTH - 3)
    found["decode of 3"] = decode(model, rows[:3])[:1]
    with torch.inference_mode():
        found["inference_mode"] = prefill(model, rows[:2])[:1]
    try:
        torch.set_num_threads(1)
        found["one thread"] = prefill(model, rows[:7])[:1]
    finally:
        torch.set_num_threads(threads)
    return [name for name, logits in found.items() if not same(logits, alone)]


def no_larger(errors, others):
    """Whether ours are larger than those of torch no more often than a coin shows heads, by three deviations."""
    worse, count = (errors > others).sum().item(), len(errors)
    return worse <= count / 2 + 1.5 * count**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_batch(family, dtype):
    model = made(family, dtype)
    with torch.no_grad():
        truth = made(family, "float64")
        truth.load_state_dict(model.state_dict())
        truth = prefill(truth, tokens())
        plain = prefill(model, tokens())
        # Its products are so small here that torch has one order for them in bf16; its gradients below differ.
        assert (family, dtype) == ("Gemma2", "bfloat16") or not same(decode(model, tokens()[:3])[:1], plain[:1])
    with samebits.torch.batch_invariant(strict=True):
        assert differing(model) == []
        ours = prefill(model, tokens())
    errors, others = ((logits.double() - truth).square().sum(-1).flatten() for logits in (ours, plain))
    assert no_larger(errors, others)


def gradients(model, size, carried=True, threads=None):
    rows = tokens()[:8]
    model.zero_grad()
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with samebits.torch.accumulate(model) if carried else contextlib.nullcontext():
            for part in rows.split(size):
                logits = model(part).logits[:, :-1].float().reshape(-1, VOCABULARY)
                torch.nn.functional.cross_entropy(logits, part[:, 1:].reshape(-1), reduction="sum").backward()
    finally:
        torch.set_num_threads(before)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_micro_batches(family, dtype):
    model = made(family, dtype)
    plain, parts = gradients(model, 8, False), gradients(model, 2, False)
    assert [name for name in plain if not same(plain[name], parts[name])] != []
    with samebits.torch.batch_invariant(strict=True):
        whole = gradients(model, 8)
        for size in (1, 2, 4):
            parts = gradients(model, size)
            assert [name for name in whole if not same(whole[name], parts[name])] == [], size
        parts = gradients(model, 8, threads=1)
        assert [name for name in whole if not same(whole[name], parts[name])] == []
    wide = made(family, "float64")
    wide.load_state_dict(model.state_dict())
    truth = gradients(wide, 8, False)
    errors, others = (torch.stack([(found[name] - truth[name]).norm() for name in truth]) for found in (whole, plain))
    assert no_larger(errors, others)
    # A wrong one would be off by its own size.
    sizes = torch.stack([truth[name].norm() for name in truth])
    assert (errors / sizes).max() <= 2 * (others / sizes).max()


def test_recomputation_moves_no_gradient():
    model = made("Llama", "bfloat16").train()
    with samebits.torch.batch_invariant(strict=True):
        whole = gradients(model, 8)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        parts = gradients(model, 2)
    assert [name for name in whole if not same(whole[name], parts[name])] == []


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_attention_of_samebits(family):
    import samebits.torch.transformers

    model = made(family, "bfloat16", attn_implementation="samebits")
    assert model.config._attn_implementation == "samebits"
    plain = made(family, "bfloat16")
    ours, theirs = prefill(model, tokens()), prefill(plain, tokens())
    assert (ours - theirs).float().square().mean() < 1e-3 * theirs.float().square().mean()
    with samebits.torch.batch_invariant(strict=True):
        assert differing(model) == []
        if family == "Llama":
            # scaled_dot_product_attention in the block is the same attention.
            assert same(prefill(model, tokens()), prefill(plain, tokens()))
    with pytest.raises(NotImplementedError, match="samebits attention: `dropout` is not supported"):
        model.config.attention_dropout = 0.5
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        model.train()(tokens()[:1])


def test_kernelize():
    import samebits.torch.transformers

    model, plain = made("Qwen3", "bfloat16"), made("Qwen3", "bfloat16")
    found = samebits.torch.transformers.kernelize(model)
    # Two norms of a layer, two of its heads, one perceptron; the norm at the end.
    assert len(found) == 2 * 5 + 1
    ours, theirs = prefill(model, tokens()), prefill(plain, tokens())
    assert (ours - theirs).float().square().mean() < 1e-3 * theirs.float().square().mean()
    with samebits.torch.batch_invariant(strict=True):
        assert differing(model) == []
        whole = gradients(model, 8)
        parts = gradients(model, 2)
        assert [name for name in whole if not same(whole[name], parts[name])] == []
    assert samebits.torch.transformers.kernelize(made("Gemma2", "bfloat16")) == []


def test_generate_has_the_tokens_of_one_alone():
    model, rows = made("Qwen2", "float32"), tokens()[:4, :9]
    with samebits.torch.batch_invariant(strict=True):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        together = model.generate(rows, attention_mask=torch.ones_like(rows), **options)
        alone = model.generate(rows[:1], attention_mask=torch.ones_like(rows[:1]), **options)
    assert torch.equal(together[:1, : alone.shape[1]], alone)
