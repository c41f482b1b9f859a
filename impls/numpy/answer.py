#!/usr/bin/env python3
"""Answers requests on stdin with numpy in float32 until the end of input; docs/WIRE.md describes the pipe."""

import json
import struct
import sys

import numpy as np


class Unsupported(Exception):
    """A combination that this program does not offer."""


def fail(reason):
    raise ValueError(reason)


STORED = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4")}
LAYOUTS = ("offset", "strided", "transposed")


def read_file(data):
    """(tensors, metadata)"""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        metadata, tensors = header.pop("__metadata__", {}), {}
        for name, entry in header.items():
            if name.startswith("expect."):
                continue
            if entry["dtype"] not in STORED:
                raise Unsupported(f"tensor `{name}`: only fp32 and i32 are offered")
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(body[begin:end], STORED[entry["dtype"]]).reshape(entry["shape"])
        return tensors, metadata
    except (struct.error, KeyError, TypeError, AttributeError, UnicodeDecodeError) as e:
        raise ValueError(f"not a safetensors file: {e}") from e


def write_file(tensors, metadata):
    header, body = {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        tensor = np.ascontiguousarray(tensor, np.float32)
        tensor = np.where(np.isnan(tensor), np.float32(np.nan), tensor)
        data = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def laid_out(tensor, layout):
    """The same elements, lying in memory as asked."""
    if layout == "offset":
        room = np.zeros(tensor.size + 1, tensor.dtype)
        room[1:] = tensor.reshape(-1)
        return room[1:].reshape(tensor.shape)
    if layout == "strided":
        room = np.zeros((*tensor.shape, 2), tensor.dtype)
        room[..., 0] = tensor
        return room[..., 0]
    if layout == "transposed":
        return np.asfortranarray(tensor)
    return tensor


def gemm(inputs, params):
    x, w, bias = inputs.pop("x"), inputs.pop("w"), inputs.pop("bias", None)
    params.pop("k_offset", None)
    partial = params.pop("k_total", str(x.shape[1])) != str(x.shape[1])
    y = x @ w.T
    return {"y": y if bias is None or partial else y + bias}


def rms_norm(inputs, params):
    x, w = inputs.pop("x"), inputs.pop("w")
    if params.pop("rounding", "once") != "once":
        raise Unsupported("param `rounding`: only once is offered")
    eps = np.float32(params.pop("eps", "1e-6"))
    if params.pop("weight_offset", "0") in ("1", "true"):
        w = w + np.float32(1)
    return {"y": x * (1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)) * w}


def softmax(inputs, params):
    x = inputs.pop("x")
    weights = np.exp(x - x.max(-1, keepdims=True))
    return {"y": weights / weights.sum(-1, keepdims=True)}


def logprob(inputs, params):
    logits, target = inputs.pop("logits"), inputs.pop("target")
    x = logits * np.float32(1 / float(params.pop("temperature", "1")))
    top = x.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))[:, 0]
    chosen = np.take_along_axis(x, np.maximum(target, 0)[:, None].astype(np.int64), 1)[:, 0]
    return {"logprob": np.where(target < 0, np.float32(0), chosen - lse), "lse": lse}


OPS = {f.__name__: f for f in (gemm, rms_norm, softmax, logprob)}


def run(inputs, metadata):
    op = metadata.pop("op", None) or fail("metadata `op`: missing")
    if op not in OPS:
        raise Unsupported(f"op `{op}` is not offered; use one of {', '.join(OPS)}")
    if metadata.pop("out", "fp32") != "fp32":
        raise Unsupported("metadata `out`: only fp32 is offered")
    if "repeat" in metadata:
        raise Unsupported("metadata `repeat`: this program does not time itself")
    layout = metadata.pop("config.layout", None)
    if layout not in (None, *LAYOUTS):
        fail(f"metadata `config.layout`: `{layout}` is not one of {', '.join(LAYOUTS)}")
    params = {k: v for k, v in metadata.items() if k not in ("case", "format") and not k.startswith("config.")}
    if params.pop("profile", "ieee") != "ieee" or params.pop("tf32", "disabled") != "disabled":
        raise Unsupported("only profile ieee with tf32 disabled is offered")
    inputs = {name: laid_out(tensor, layout) for name, tensor in inputs.items()}
    with np.errstate(all="ignore"):
        outputs = OPS[op](inputs, params)
    if inputs or params:
        fail(f"{op} takes no {', '.join([*inputs, *params])}")
    said = {"layout": layout} if layout else {}
    return outputs, {"status": "ok", "reason": "", "kernel": f"{op}/numpy", **said}


def answer(data):
    number = {}
    try:
        inputs, metadata = read_file(data)
        if "config.id" in metadata:
            number = {"id": metadata["config.id"]}
        outputs, said = run(inputs, metadata)
        return write_file(outputs, {**said, **number})
    except Unsupported as e:
        return write_file({}, {"status": "unsupported", "reason": str(e), "kernel": "", **number})
    except (ValueError, IndexError, KeyError) as e:
        return write_file({}, {"status": "error", "reason": " ".join(str(e).split()), "kernel": "", **number})


def main():
    pipe, out = sys.stdin.buffer, sys.stdout.buffer
    while head := pipe.read(8):
        if len(head) < 8:
            sys.exit("input ends inside the length of a frame")
        (size,) = struct.unpack("<Q", head)
        data = pipe.read(size)
        if len(data) < size:
            sys.exit("input ends inside a frame")
        reply = answer(data)
        out.write(struct.pack("<Q", len(reply)) + reply)
        out.flush()


if __name__ == "__main__":
    main()
