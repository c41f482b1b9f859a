"""Writes models/src/read_fields.txt: the fields of `config.json` that the code of some decoder model in transformers reads.

A family refuses such a field where it does not read it itself and the value could ask for something. Left out are fields that
change no forward: dropout, initial values, losses, what is returned, and names that are methods.

    python goldens/generate/fields.py        # transformers 5.23
"""

import pathlib
import re

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HERE = pathlib.Path(__file__).parent
OUT = HERE.parent.parent / "models/src/read_fields.txt"

# Training, bookkeeping, and what is no field.
WITHOUT_EFFECT = re.compile(
    r"^_|dropout|pdrop|layerdrop|init(_|$|ializer)|jitter|loss|gradient|^output_(attentions|hidden_states|router)|^return_dict|^use_cache$"
    r"|^(to_dict|get_text_config|dtype|seed|problem_type|num_labels|id2label|is_decoder|is_encoder_decoder|add_cross_attention)$"
    r"|^(cross_attention_hidden_size|chunk_size_feed_forward|sep_token_id|decoder_start_token_id|mask_token_id|pretraining_tp)$"
)
# Read by code that folders of these families bring along or were converted from.
BESIDE = [
    "dim_model_base", "rope_interleaved", "rope_ratio", "rotary_emb_base", "rotary_emb_fraction", "rotary_emb_interleaved",
    "rotary_pct", "use_dynamic_ntk", "use_logn_attn", "use_mrope",
]  # fmt: skip


def main() -> None:
    classes = {name if isinstance(name, str) else name[0] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    names = set(BESIDE)
    for file in pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        if any(f"class {name}(" in text for name in classes):
            names |= set(re.findall(r"\bconfig\.(\w+)", text))
            names |= set(re.findall(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"', text))
    names = sorted(name for name in names if not WITHOUT_EFFECT.search(name))
    OUT.write_text("".join(f"{name}\n" for name in names))


if __name__ == "__main__":
    main()
