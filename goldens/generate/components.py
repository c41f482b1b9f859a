"""Writes small components of diffusers and transformers, and what these answer.

    python goldens/generate/components.py NAME ..

A folder models/tests/components/NAME holds the component as the library saves it, with weights in bf16, and
`recorded.safetensors`: for each run its arguments `RUN.in.ARGUMENT`, the library's answer in fp32, `RUN.out`, and in bf16,
`RUN.bf16`. Versions stand in the metadata.

`pipeline` and `pipeline_xl` are folders of whole pipelines. They record for each sampler the latents behind each step and the image, in fp32
(`SAMPLER.latents.N`, `SAMPLER.image`) and the image in bf16 (`SAMPLER.bf16`), and what goes in: `latents.0`, `noise`; and the
tokens of some texts, `tokens.N`.
"""

import json
import sys
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

ROOT = Path(__file__).resolve().parents[2] / "models" / "tests" / "components"


def vae(**more):
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
        **more,
    )


def unet(**more):
    form = dict(
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=2,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=8,
    )
    return UNet2DConditionModel(**(form | more))


# As in SDXL.
XL = dict(
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    transformer_layers_per_block=[1, 2],
    attention_head_dim=[2, 4],
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=6,
    projection_class_embeddings_input_dim=46,
)


def clip(kind, **more):
    form = dict(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=13,
        projection_dim=12,
    )
    return kind(CLIPTextConfig(**(form | more)))


def decoded(model, z):
    return model.decode(z).sample


def encoded(model, sample):
    return model.encode(sample).latent_dist.parameters


def denoised(model, sample, timestep, encoder_hidden_states, **added):
    return model(sample, timestep, encoder_hidden_states, added_cond_kwargs=added or None).sample


def last(model, input_ids, attention_mask=None):
    return model(input_ids, attention_mask=attention_mask)[0]


def noise(*shape):
    return torch.randn(shape)


def images():
    return {
        "decode": (decoded, {"z": noise(2, 4, 5, 7)}),
        "encode": (encoded, {"sample": noise(2, 3, 12, 18)}),
    }


def steps(**more):
    return {
        "step": (denoised, {
            "sample": noise(3, 4, 6, 10),
            "timestep": torch.tensor([981.0, 1.0, 333.25]),
            "encoder_hidden_states": noise(3, 5, 12),
        } | more),
        # Places that are no multiple of what the lowest resolution has.
        "odd": (denoised, {
            "sample": noise(1, 4, 5, 7),
            "timestep": torch.tensor([500], dtype=torch.int32),
            "encoder_hidden_states": noise(1, 3, 12),
        } | {name: values[:1] for name, values in more.items()}),
    }


def texts(end):
    ids = torch.randint(1, 90, (3, 9), dtype=torch.int32)
    ids[0, 8], ids[1, 5], ids[1, 6:], ids[2, 3], ids[2, 7] = end, end, 0, end, end
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"all": (last, {"input_ids": ids}), "masked": (last, {"input_ids": ids, "attention_mask": mask})}


def made():
    """Each component and its runs."""
    return {
        "vae": lambda: (vae(), images()),
        "vae_plain": lambda: (
            vae(use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False, shift_factor=0.1),
            images(),
        ),
        "unet": lambda: (unet(), steps()),
        "unet2": lambda: (
            unet(
                use_linear_projection=True,
                attention_head_dim=[2, 4],
                layers_per_block=2,
                flip_sin_to_cos=False,
                freq_shift=1,
                downsample_padding=0,
            ),
            steps(),
        ),
        "unet_xl": lambda: (
            unet(**XL),
            steps(text_embeds=noise(3, 10), time_ids=torch.tensor([[64.0, 48, 0, 0, 64, 48]] * 3)),
        ),
        "clip": lambda: (clip(CLIPTextModel, eos_token_id=2), texts(98)),
        "clip_projection": lambda: (
            clip(CLIPTextModelWithProjection, eos_token_id=95, hidden_act="gelu"),
            texts(95),
        ),
    }


def lively(model):
    """The library begins with norms that change nothing, and with last layers that are small."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval().to(torch.bfloat16)


TEXTS = ["A lighthouse, in the  fog!", "it's 12 o'clock", "", "\u00c9tude in C\u2019s key <|endoftext|> 3"]


def tokenizer():
    letters = list(transformers.convert_slow_tokenizer.bytes_to_unicode().values())
    merges = ["t h", "th e</w>", "l i", "h o", "i n</w>", "s e</w>", "ho u"]
    words = letters + [letter + "</w>" for letter in letters] + [merge.replace(" ", "") for merge in merges]
    vocab = {word: number for number, word in enumerate(words + ["<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges], model_max_length=40), vocab


def pipeline(name):
    torch.manual_seed(7)
    words, vocab = tokenizer()
    xl = name == "pipeline_xl"
    form = dict(vocab_size=len(vocab), hidden_size=6 if xl else 12, max_position_embeddings=40, eos_token_id=2)
    text = clip(CLIPTextModel, **form)
    more = {}
    if xl:
        # The last layer of the first encoder is never read.
        text.encoder.layers[-1].mlp.fc1.weight.data[0, 0] = float("nan")
        second = lively(clip(CLIPTextModelWithProjection, **(form | {"hidden_act": "gelu", "projection_dim": 10})))
        more = dict(text_encoder_2=second, tokenizer_2=words, add_watermarker=False)
    else:
        more = dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    betas = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    whole = (StableDiffusionXLPipeline if xl else StableDiffusionPipeline)(
        text_encoder=lively(text),
        tokenizer=words,
        unet=lively(unet(**(XL if xl else {}))),
        vae=lively(vae()),
        scheduler=EulerDiscreteScheduler(**betas, steps_offset=1, timestep_spacing="leading"),
        **more,
    )
    folder = ROOT / name
    whole.save_pretrained(folder, safe_serialization=True)
    latents, drawn = noise(2, 4, 8, 12), noise(4, 2, 4, 8, 12)
    tensors = {"latents.0": latents, "noise": drawn}
    for number, prompt in enumerate(TEXTS):
        ids = words(prompt, padding="max_length", max_length=40).input_ids
        tensors[f"tokens.{number}"] = torch.tensor(ids, dtype=torch.int32)
    schedulers = {
        "euler": EulerDiscreteScheduler,
        "euler_ancestral": EulerAncestralDiscreteScheduler,
        "dpmpp_2m_karras": DPMSolverMultistepScheduler,
    }
    told = whole.scheduler.config
    for dtype in [torch.bfloat16, torch.float32]:
        whole.to(dtype)
        for name, kind in schedulers.items():
            more = {"use_karras_sigmas": True} if name.endswith("karras") else {}
            whole.scheduler = kind.from_config(told, **more)
            seen, draws = [], iter(drawn)
            kind_of = diffusers.schedulers.scheduling_euler_ancestral_discrete
            kind_of.randn_tensor = lambda *_, **__: next(draws).to(dtype)
            image = whole(
                TEXTS[:2],
                negative_prompt=None if xl else [TEXTS[3]] * 2,
                guidance_scale=5.0,
                height=16,
                width=24,
                num_inference_steps=4,
                latents=latents.to(dtype),
                output_type="pt",
                callback_on_step_end=lambda _, __, ___, values: seen.append(values["latents"].float().clone()) or values,
            ).images
            if dtype == torch.float32:
                tensors |= {f"{name}.latents.{i + 1}": x for i, x in enumerate(seen)}
                tensors[f"{name}.image"] = image
            else:
                tensors[f"{name}.bf16"] = image.float()
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "transformers": transformers.__version__}
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / "recorded.safetensors", metadata=versions)
    print(folder.name, [p.name for p in folder.iterdir()])


def record(name):
    if name.startswith("pipeline"):
        return pipeline(name)
    torch.manual_seed(sum(name.encode()))
    model, runs = made()[name]()
    narrow = lively(model)
    folder = ROOT / name
    narrow.save_pretrained(folder, safe_serialization=True)
    tensors = {}
    with torch.no_grad():
        for run, (forward, arguments) in runs.items():
            floats = {k: v for k, v in arguments.items() if v.is_floating_point() and k not in ("timestep", "time_ids")}
            tensors |= {f"{run}.in.{k}": v for k, v in arguments.items()}
            tensors[f"{run}.bf16"] = forward(narrow, **(arguments | {k: v.bfloat16() for k, v in floats.items()})).float()
        wide = narrow.float()
        for run, (forward, arguments) in runs.items():
            tensors[f"{run}.out"] = forward(wide, **arguments)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "transformers": transformers.__version__}
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / "recorded.safetensors", metadata=versions)
    config = json.loads((folder / "config.json").read_text())
    print(name, sum(p.numel() for p in wide.parameters()), config.get("_class_name") or config["architectures"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*made(), "pipeline", "pipeline_xl"]:
        record(name)
