"""All families of transformers that have a causal language model, each as a tiny one of random weights: which of them have other numbers
beside a longer text within `batch_invariant`, and why.
"""

import inspect
import os
import re
from pathlib import Path

import pytest
import samebits.torch
import torch
from conftest import same

transformers = pytest.importorskip("transformers", reason="transformers is not installed: ci/python installs it")
transformers.logging.set_verbosity_error()

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES  # noqa: E402
from transformers.modeling_rope_utils import dynamic_rope_update  # noqa: E402

NIGHTLY = "SAMEBITS_NIGHTLY" in os.environ
SHORT, LONG = 8, 24
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Of those that have them.
MORE = {
    "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "first_k_dense_replace": 1, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "d_model": 64, "n_heads": 4, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96, "ffn_dim": 96, "word_embed_proj_dim": 64, "sliding_window": 8, "shared_expert_intermediate_size": 32,
    "state_size": 8, "num_kv_heads": 2, "embedding_size": 64, "d_inner": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 96,
    "rotary_dim": 8, "n_shared_experts": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
}  # fmt: skip

# By reason: the families whose numbers within the block depend on who stands beside them, and padded on which side. A reason that the
# block knows is named by `uncovered`, and strict mode refuses it; the others are docs/PYTHON.md's.
DEPENDS = {
    # (BigBird makes its attention anew for short texts, at random, and then takes the old weights.)
    # (Chunks that are counted from the first padded token; those of Mamba-2 are longer than these texts.)
    "named": {
        "mpt": "right", "falcon": "right left", "big_bird": "",
        **dict.fromkeys("bailing_hybrid kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text".split(), "left"),
        **dict.fromkeys("bamba falcon_h1 granitemoehybrid nemotron_h".split(), ""),
    },
    # Positions are counted from the first padded token, as in torch without the block.
    "places": dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet roformer trocr whisper".split(), "left"
    ),
    # The model does not take the mask.
    "mask": {"cpmant": "right", "prophetnet": "right left"},
    # States that padded tokens move.
    "states": dict.fromkeys("recurrent_gemma rwkv xlstm".split(), "left"),
}
# What is not made of these sizes.
NOT_MADE = set(
    """
    blt cohere_compass_text dbrx fuyu gemma3 gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_unified
    gemma4_text gemma4_unified_assistant git got_ocr2 gpt_neo lfm2_moe longcat_flash mamba2 moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal
    reformer xmod zamba zamba2 zaya
    """.split()
)


def made(family, **own):
    """A model of a family of random weights."""
    name = NAMES[family]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    config = kind.config_class
    known = {*inspect.signature(config.__init__).parameters, *getattr(config, "__dataclass_fields__", {}), *getattr(config, "attribute_map", {})}
    heads = {"num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    given = {key: value for key, value in {**SIZES, **MORE, **heads}.items() if key in known or key.endswith("_token_id") or key == "vocab_size"}
    given |= own
    try:
        config = config(**given)
    except Exception:
        config = config(**{key: value for key, value in given.items() if key != "num_key_value_heads"})
    config.is_decoder = True
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in kind(config).parameters())
    assert elements < 3e7, f"it has {elements} parameters"
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0)
    return model.float().eval()


def texts():
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(3, 97, (1, length), generator=generator) for length in (SHORT, LONG))


@torch.no_grad()
def beside(model, side):
    """Logits of a short text alone, and padded on a side beside a longer one."""
    short, long = texts()
    blank = torch.zeros(1, LONG - SHORT, dtype=torch.long)
    order = (lambda text, blank: torch.cat([text, blank] if side == "right" else [blank, text], 1))
    mask = torch.cat([order(torch.ones_like(short), blank), torch.ones_like(long)])
    places, embeddings = {}, getattr(model.base_model, "embeddings", None)
    by_padding = hasattr(embeddings, "padding_idx") and not isinstance(embeddings, torch.nn.Embedding)
    if "position_ids" in inspect.signature(model.forward).parameters and not by_padding:
        # Those with an index of padding count places by it.
        places = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    alone = model(short, attention_mask=torch.ones_like(short), use_cache=False).logits[0]
    both = model(torch.cat([order(short, blank), long]), attention_mask=mask, use_cache=False, **places).logits[0]
    return alone, both[:SHORT] if side == "right" else both[-SHORT:]


# All of them take a quarter of an hour.
@pytest.mark.parametrize("family", sorted(NAMES) if NIGHTLY else ["llama", "bloom", "gemma3_text", "mpt", "bart", "rwkv", "zaya"])
def test_who_depends_on_a_longer_neighbour(family):
    expected = {side for families in DEPENDS.values() for side in families.get(family, "").split()}
    try:
        model = made(family)
        with samebits.torch.batch_invariant():
            found = {side for side in ("right", "left") if not same(*beside(model, side))}
            named = samebits.torch.uncovered()
    except Exception as error:
        assert family in NOT_MADE, f"{family} cannot be made: {error!r}; give it sizes, or name it"
        return
    assert family not in NOT_MADE and found == expected, (found, named)
    assert bool(named) == (family in DEPENDS["named"]), named
    if named and found:
        with samebits.torch.batch_invariant(strict=True), pytest.raises(RuntimeError, match="batch_invariant: "):
            beside(model, "right" if "right" in found else "left")


# --- rotary positions whose frequencies depend on a length


def scaled(kind, dim=16):
    """Of a model that was trained on 16 positions."""
    if kind == "dynamic":
        return {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    factors = {"short_factor": [1.0] * (dim // 2), "long_factor": [1.0 + i for i in range(dim // 2)]}
    return {"rope_type": "longrope", "rope_theta": 1e4, **factors, "original_max_position_embeddings": 16, "short_mscale": 1.1, "long_mscale": 1.3}


def with_frequencies(family, kind):
    dim = {"deepseek_v3": 8, "glm": 8, "stablelm": 4, "gpt_neox": 4, "nemotron": 8, "phi": 8, "persimmon": 8, "minicpm3": 8}.get(family, 16)
    given = scaled(kind, dim)
    if family == "gemma3_text":
        given = {"sliding_attention": given, "full_attention": scaled("dynamic" if kind == "longrope" else "longrope", dim)}
        return made(family, rope_parameters=given, max_position_embeddings=16, layer_types=["sliding_attention", "full_attention"])
    own = {"original_max_position_embeddings": 16} if family == "phi3" else {}
    return made(family, rope_parameters=given, max_position_embeddings=16 if kind == "dynamic" else 256, **own)


ROTARY = ["llama", "phi3", "phimoe", "gemma3_text", "deepseek_v3"]
if NIGHTLY:
    ROTARY += ["qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "cohere", "olmo2", "granite", "smollm3", "starcoder2", "ernie4_5"]


# Phi has longrope alone.
@pytest.mark.parametrize("family, kind", [(f, kind) for f in ROTARY for kind in ("dynamic", "longrope") if kind == "longrope" or not f.startswith("phi")])
def test_frequencies_belong_to_a_declared_length(family, kind):
    short, long = texts()
    # It is so without: who stands beside is seen in the frequencies, and named.
    model = with_frequencies(family, kind)
    with samebits.torch.batch_invariant():
        assert not same(*beside(model, "right"))
        (name,) = {name.partition("(")[0] for name in samebits.torch.uncovered()}
        assert name.endswith("RotaryEmbedding")
    model = with_frequencies(family, kind)
    with samebits.torch.batch_invariant(strict=True):
        with pytest.raises(RuntimeError, match=rf"batch_invariant: {name}\((dynamic|longrope)\) takes its frequencies from the longest text"):
            beside(model, "right")
    for length in (LONG, 40):
        # The module has seen another length before.
        with samebits.torch.batch_invariant(strict=True, rope_length=length), torch.no_grad():
            for side in ("right", "left"):
                assert same(*beside(model, side))
            whole = model(long).logits
            step = model(long[:, :14], use_cache=True)
            rows = [step.logits]
            for token in long[0, 14:]:
                step = model(token.reshape(1, 1), past_key_values=step.past_key_values, use_cache=True)
                rows.append(step.logits)
            assert same(torch.cat(rows, 1), whole) and samebits.torch.uncovered() == {}
        if length == LONG:
            # What transformers computes for a text of that length.
            fresh = with_frequencies(family, kind)
            with samebits.torch.batch_invariant(), torch.no_grad():
                assert same(fresh(long).logits, whole)
    with samebits.torch.batch_invariant(rope_length=20), pytest.raises(ValueError, match="is given 24 positions; rope_length is 20"):
        model(long)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_without_a_declared_length_are_those_of_the_training(kind):
    """As long as no text is longer, whatever the module has seen before."""
    model, (short, long) = with_frequencies("llama", kind), texts()
    rows = torch.cat([short, long[:, :SHORT]])
    with torch.no_grad():
        plain = with_frequencies("llama", kind)(short).logits
        with samebits.torch.batch_invariant(strict=True):
            alone = model(short).logits
            assert same(model(rows).logits[:1], alone) and samebits.torch.uncovered() == {}
        # And has nothing of it outside.
        assert same(model(long).logits, with_frequencies("llama", kind)(long).logits)
        with samebits.torch.batch_invariant(strict=True):
            assert same(model(short).logits, alone)
            # An inner block may declare one, and then has other frequencies.
            with samebits.torch.batch_invariant(strict=True, rope_length=LONG):
                other = model(short).logits
                with samebits.torch.batch_invariant(strict=True):
                    assert same(model(short).logits, other)
            assert not same(other, alone) and same(model(short).logits, alone)
        assert (alone - plain).abs().max() < (other - plain).abs().max() / 100
    with pytest.raises(ValueError, match="rope_length: is 0; it must be at least 1"):
        samebits.torch.batch_invariant(rope_length=0)


class Remote(torch.nn.Module):
    """As code that comes with a folder writes it: no module of transformers, and its trained length is not said in a way that is known."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4))

    def forward(self, position_ids):
        longest = position_ids.max() + 1
        return position_ids[..., None] * (self.inv_freq / 2 if longest > 16 else self.inv_freq)


def test_modules_that_are_not_transformers_are_seen_by_their_frequencies():
    rotary, places = Remote(), torch.arange(8)[None]
    both = torch.cat([places, 2 * places])[:, :, None].expand(2, 8, 3).reshape(2, 24) + 4
    with samebits.torch.batch_invariant():
        assert not same(rotary(both)[:1], rotary(both[:1]))
        assert samebits.torch.uncovered() == {"Remote(rope)": 2}
    with samebits.torch.batch_invariant(strict=True), pytest.raises(RuntimeError, match=r"Remote\(rope\) takes its frequencies"):
        rotary(both[:1])
    with samebits.torch.batch_invariant(strict=True, rope_length=32):
        assert same(rotary(both)[:1], rotary(both[:1])) and same(rotary(both[:1]), both[:1, :, None] / 2 * torch.ones(4))
        # Of numbers that are no positions, and of modules without frequencies, the largest is what it is.
        assert both.max() == 18 and torch.max(both.float()) == 18


# What asks in transformers for the longest position of a batch: the decorator of rotary modules and PhiMoE's own, which the block holds; the
# others cut a table to what is needed, or count on behind images and sound.
ASKS = re.compile(r"torch\.(a?max)\(\s*position_ids\s*\)|position_ids\.(a?max)\(\s*\)")
KNOWN = {"modeling_rope_utils.py": 2, "models/phimoe/modeling_phimoe.py": 1, "models/reformer/modeling_reformer.py": 1, "models/hunyuan_vl/modeling_hunyuan_vl.py": 1}


def test_no_module_asks_for_the_longest_position_unseen():
    home = Path(transformers.__file__).parent
    files = [home / "modeling_rope_utils.py", *sorted(home.glob("models/*/modeling_*.py"))]
    found = {str(file.relative_to(home)): len(ASKS.findall(file.read_text(encoding="utf-8"))) for file in files}
    asks = {name: count for name, count in found.items() if count}
    # Older versions have fewer families.
    assert len(files) > 300 and asks.items() <= KNOWN.items() and {"modeling_rope_utils.py", "models/phimoe/modeling_phimoe.py"} <= asks.keys()
    # The block sees the function that asks by its module, `self`.
    names = {code.co_name: code.co_varnames for code in dynamic_rope_update.__code__.co_consts if inspect.iscode(code)}
    assert {name for name, variables in names.items() if variables[:2] == ("self", "position_ids")} == {
        "longrope_frequency_update", "dynamic_frequency_update",
    }
