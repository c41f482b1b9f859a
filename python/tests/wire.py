"""The wire (docs/WIRE.md), as far as these tests speak it: safetensors files behind their length."""

import json
import pathlib
import struct
import subprocess
import sys

import torch

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def encode(metadata, tensors):
    header, at = {"__metadata__": metadata}, 0
    bodies = []
    for name, tensor in tensors.items():
        body = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(body)]}
        at += len(body)
        bodies.append(body)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(bodies)


def decode(data):
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(bytearray(data[begin:end]), dtype=DTYPES[entry["dtype"]]) if end > begin else None
        tensors[name] = torch.zeros(entry["shape"], dtype=DTYPES[entry["dtype"]]) if flat is None else flat.reshape(entry["shape"])
    return metadata, tensors


def answers(requests):
    """What the built-in program answers."""
    frames = [encode(metadata, tensors) for metadata, tensors in requests]
    stdin = b"".join(struct.pack("<Q", len(frame)) + frame for frame in frames)
    command = [sys.executable, "-m", "samebits", "answer", "--threads", "1"]
    out = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, check=True).stdout
    found, at = [], 0
    while at < len(out):
        (length,) = struct.unpack_from("<Q", out, at)
        found.append(decode(out[at + 8 : at + 8 + length]))
        at += 8 + length
    assert len(found) == len(requests)
    return found


def vectors():
    """The files of outputs that an independent program computed, where the repository is at hand."""
    return sorted((pathlib.Path(__file__).parents[2] / "tests" / "vectors").glob("*.safetensors"))
