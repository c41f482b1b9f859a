"""Prompts are the tokens that `AutoTokenizer` of transformers gives: kinds of tokenizer folders as they are published and re-saved."""

import json
import shutil

import pytest

transformers = pytest.importorskip("transformers")
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from samebits import Engine

TEXT = ["hello world 12+34=46 the cat sat on the mat", "hello <s> </s> user assistant héé"] * 3
TEXTS = [
    "hello world",
    "<s>hello</s> world",
    " a  b\nthe cat\n\n",
    "12+34=46, héé 🦀 don't",
    "<|im_start|>user\nhello<|im_end|> world<pad>",
    "<bos>the <extra> mat<eos>",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def level(special=(), post=None):
    """BPE over bytes, as GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet))
    tokenizer.post_processor = post
    return tokenizer


def pieces(special=("<unk>", "<s>", "</s>"), post=None, old=True):
    """BPE over characters with bytes for the others, as Llama 2 and Gemma; `old`: spaces are made by a normalizer."""
    found = list(special) + [f"<0x{b:02X}>" for b in range(256)]
    trained = Tokenizer(models.BPE(unk_token=special[0]))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=380, special_tokens=found))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token=special[0], fuse_unk=True, byte_fallback=True))
    if old:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = post
    return tokenizer


def before(token, number, behind=None):
    """A template with a token before the text, and one behind it."""
    special = [(token, number)] + ([behind] if behind else [])
    single = f"{token} $A" + (f" {behind[0]}" if behind else "")
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)


def words():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2, "the": 3, "<s>": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def added(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} | flags


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
FAST, LLAMA, QWEN, GEMMA, GPT2 = (
    {"tokenizer_class": name}
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer")
)
CHAT = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
GEMMAS = ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>")
DECODER = {"300": added("<extra>"), "301": added("<|im_start|>", special=False)}

# Family, tokenizer, tokenizer_config.json (None for no file), other files.
KINDS = {
    "llama 2": ("llama", pieces(post=before("<s>", 1)), LLAMA | NAMED | {"add_bos_token": True, "legacy": False}, {}),
    "llama 2, legacy": ("llama", pieces(post=before("<s>", 1)), LLAMA | NAMED | {"legacy": True}, {}),
    "llama 2 by another name": ("llama", pieces(post=before("<s>", 1)), {"tokenizer_class": "LlamaTokenizerFast"} | NAMED, {}),
    "llama 2 without prefix space": ("llama", pieces(), LLAMA | NAMED | {"add_prefix_space": False}, {}),
    "llama 2 as its file says": ("llama", pieces(post=before("<s>", 1)), FAST | NAMED, {}),
    "llama without settings": ("llama", pieces(post=before("<s>", 1)), None, {}),
    "llama 3": ("llama", level(["<s>", "</s>"], before("<s>", 0)), FAST | NAMED, {}),
    "llama 3 called llama 2": ("llama", level(["<s>", "</s>"], before("<s>", 0)), LLAMA | NAMED, {}),
    "no template": ("llama", level(["<s>", "</s>"]), FAST | NAMED, {}),
    "no template, bos asked for": ("llama", level(["<s>", "</s>"]), FAST | NAMED | {"add_bos_token": True}, {}),
    "template, bos forbidden": ("llama", level(["<s>", "</s>"], before("<s>", 0)), FAST | NAMED | {"add_bos_token": False}, {}),
    "template with bos and eos": ("llama", level(["<s>", "</s>"], before("<s>", 0, ("</s>", 1))), FAST | NAMED, {}),
    "smollm2": ("llama", level(SPECIAL), GPT2 | {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "add_prefix_space": False}, {}),
    "gpt2 with prefix space": ("llama", level(SPECIAL), GPT2 | {"add_prefix_space": True}, {}),
    "qwen2.5": ("qwen2", level(SPECIAL), QWEN | CHAT | {"add_bos_token": False}, {}),
    "qwen2.5 without settings": ("qwen2", level(SPECIAL), None, {}),
    "qwen3": ("qwen3", level(SPECIAL), QWEN | CHAT | {"add_prefix_space": False}, {}),
    "r1-distill-qwen": ("qwen2", level(["<s>", "</s>"], before("<s>", 0)), {"tokenizer_class": "LlamaTokenizerFast"} | NAMED, {}),
    "qwen3 called llama": ("qwen3", level(["<s>", "</s>"], before("<s>", 0)), {"tokenizer_class": "LlamaTokenizerFast"} | NAMED, {}),
    "gemma 2": ("gemma2", pieces(GEMMAS, before("<bos>", 1), old=False), GEMMA | {"bos_token": "<bos>", "eos_token": "<eos>"}, {}),
    "gemma 2 without settings": ("gemma2", pieces(GEMMAS, before("<bos>", 1)), None, {}),
    "phi-3": ("phi3", pieces(post=None), LLAMA | NAMED | {"add_bos_token": False, "legacy": False}, {}),
    "mistral": ("mistral", pieces(post=before("<s>", 1)), LLAMA | NAMED | {"add_bos_token": True}, {}),
    "mixtral, new spaces": ("mixtral", pieces(post=before("<s>", 1), old=False), LLAMA | NAMED, {}),
    "deepseek": ("deepseek_v3", level(["<s>", "</s>"], before("<s>", 0)), {"tokenizer_class": "LlamaTokenizerFast"} | NAMED, {}),
    "class nobody knows": ("llama", level(["<s>", "</s>"], before("<s>", 0)), {"tokenizer_class": "OurTokenizer"} | NAMED, {}),
    "added in settings": ("llama", level(["<s>", "</s>"]), FAST | NAMED | {"added_tokens_decoder": DECODER}, {}),
    "added in settings, bare": ("llama", level(["<s>", "</s>"]), FAST | {"added_tokens_decoder": DECODER}, {}),
    "added to qwen2": ("qwen2", level(SPECIAL), QWEN | CHAT | {"added_tokens_decoder": DECODER}, {}),
    "additional special": ("llama", level(), FAST | NAMED | {"additional_special_tokens": ["<|im_start|>", "<extra>"]}, {}),
    "extra special": ("llama", level(), FAST | NAMED | {"extra_special_tokens": ["<extra>"]}, {}),
    "padding named alone": ("llama", level(), FAST | NAMED | {"pad_token": "<pad>", "image_token": "<extra>"}, {}),
    "special_tokens_map": ("llama", level(), FAST, {"special_tokens_map.json": {"bos_token": added("<s>"), "pad_token": "<pad>"}}),
    "added_tokens.json": ("llama", level(), FAST | NAMED, {"added_tokens.json": {"<extra>": 300, "</s>": 301}}),
    "words": ("llama", words(), FAST | {"unk_token": "<unk>"}, {}),
    "words of qwen": ("qwen3", words(), FAST | {"unk_token": "<unk>"}, {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model of each family."""
    made = {}
    for family in {family for family, *_ in KINDS.values()}:
        config = transformers.AutoConfig.for_model(family)
        sizes = dict(vocab_size=512, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        sizes |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, pad_token_id=None, bos_token_id=None)
        if family == "mixtral":
            sizes |= dict(num_local_experts=2)
        if family == "deepseek_v3":
            sizes |= dict(first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
            sizes |= dict(num_nextn_predict_layers=0, head_dim=8, qk_head_dim=16)
        for name, value in sizes.items():
            setattr(config, name, value)
        config.eos_token_id, config.layer_types = 2, None
        folder = tmp_path_factory.mktemp(family)
        transformers.AutoModelForCausalLM.from_config(type(config)(**config.to_dict())).save_pretrained(folder)
        made[family] = folder
    return made


def ids(folder, texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [False, True], ids=["published", "saved again"])
def test_prompts_are_those_of_transformers(kind, again, folders, tmp_path):
    family, tokenizer, settings, files = KINDS[kind]
    folder = tmp_path / "model"
    shutil.copytree(folders[family], folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    if again:
        # What a trainer leaves.
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", *files):
            (folder / name).unlink(missing_ok=True)
        loaded.save_pretrained(folder)
    texts = TEXTS if not kind.startswith("words") else ["hello world", "<s> the world", "hello hello"]
    engine = Engine(folder)
    assert engine.tokens(texts) == ids(folder, texts)


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & \"kind\"."},
    {"role": "user", "content": " What is 1 + 2?\n"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 2 + 2?"},
]
TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "qwen": "{%- if tools %}\n    {{- 'tools' }}\n{%- else %}\n    {%- if messages[0]['role'] == 'system' %}\n        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n    {%- else %}\n        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n{%- for message in messages %}\n    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) or (message.role == \"assistant\" and not message.tool_calls) %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n",
    "llama 3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}",
    "llama 2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "namespace": "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\n{{ bos_token }}{{ ns.last }} {{ messages | length }} {{ messages[-1].content.split(' ')[0] }} {{ messages[::-1][0].role.upper() }} {{ true }} {{ none }} {{ messages[0].missing is defined }}\n",
    "json": "{% for m in messages %}\n  {{ m | tojson }}\n{% endfor %}\n{{ messages[0] | tojson(indent=2) }}{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "breaks": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_are_those_of_transformers(template, place, folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    level(["<s>", "</s>", *SPECIAL], before("<s>", 0)).save(str(folder / "tokenizer.json"))
    settings = FAST | NAMED | ({"chat_template": TEMPLATES[template]} if place.startswith("tokenizer") else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if place.endswith("jinja"):
        (folder / place).write_text(TEMPLATES[template])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    engine = Engine(folder)
    for messages in (CONVERSATION, CONVERSATION[1:]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert engine.tokens(messages) == [expected]
        assert engine.tokens([messages, messages[-1:]])[0] == expected
