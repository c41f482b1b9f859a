"""Blocks of every format of GGUF that is read, and the numbers that the package gguf (of llama.cpp) makes of them, as bits of f32:
models/src/gguf/blocks.json. Scales are finite, small and large ones of both signs; other bits are random.

    python goldens/generate/gguf_blocks.py
"""

import json
import pathlib

import gguf
import numpy as np

# The bytes of each format that hold scales in f16.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": [],
}  # fmt: skip
BLOCKS = 3

random = np.random.default_rng(53)
found = {}
for name, places in SCALES.items():
    kind = getattr(gguf.GGMLQuantizationType, name)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for place in places:
        scales = np.array([0.0371, -1.9e-6, 113.0], np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(BLOCKS, 2)
    if name == "MXFP4":
        blocks[:, 0] = [0, 1, 130]
    numbers = gguf.quants.dequantize(blocks, kind).astype(np.float32)
    found[name] = {"bytes": blocks.tobytes().hex(), "bits": numbers.tobytes().hex()}
path = pathlib.Path(__file__).resolve().parents[2] / "models/src/gguf/blocks.json"
path.write_text(json.dumps(found, indent=0) + "\n")
