#!/usr/bin/env python3
"""Answers requests on stdin until the end of input: a whole implementation under test in the standard library.

Run it as `python3 impls/pure/answer.py`. docs/WIRE.md describes what goes through the pipe.
"""

import json
import math
import struct
import sys

import ops
from f32 import f32, from_bits

FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
NAMES = {stored: name for name, stored in FLOATS.items()}
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}


class Unsupported(Exception):
    """A combination that this program does not offer."""


# Storage: bytes to values and back, with the last rounding.

def unpack(dtype, data):
    if dtype == "BF16":
        return [from_bits(bits << 16) for (bits,) in struct.iter_unpack("<H", data)]
    return [value for (value,) in struct.iter_unpack({"F16": "<e", "F32": "<f", "I32": "<i"}[dtype], data)]


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def pack(dtype, values):
    return b"".join(pack_one(dtype, value) for value in values)


def pack_one(dtype, value):
    if math.isnan(value):
        return {"BF16": b"\xc0\x7f", "F16": b"\x00\x7e", "F32": b"\x00\x00\xc0\x7f"}[dtype]
    if dtype == "BF16":
        return struct.pack("<H", bf16_bits(value))
    if dtype == "F32":
        return struct.pack("<f", value)
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def round_bf16(value):
    return value if math.isnan(value) else from_bits(bf16_bits(value) << 16)


# Messages: a safetensors file each.

def read_file(data):
    """(tensors, metadata); a tensor is (dtype, shape, values)."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        body, tensors = data[8 + size :], {}
        for name, entry in header.items():
            dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
            if dtype not in SIZES or name.startswith("expect."):
                tensors[name] = (dtype, entry["shape"], None)
                continue
            if not 0 <= begin <= end <= len(body) or end - begin != math.prod(entry["shape"]) * SIZES[dtype]:
                raise ValueError(f"tensor `{name}` does not fit its shape")
            tensors[name] = (dtype, entry["shape"], unpack(dtype, body[begin:end]))
        return tensors, metadata
    except (struct.error, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise ValueError(f"not a safetensors file: {e}") from e


def write_file(tensors, metadata):
    header, body = {"__metadata__": metadata}, b""
    for name, (dtype, shape, values) in tensors.items():
        data = pack(dtype, values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


# Requests.

def rows(tensor, axes=2):
    dtype, shape, values = tensor
    if len(shape) != axes:
        raise ValueError(f"shape {shape} must have {axes} axes")
    if axes == 1:
        return values
    return [values[shape[1] * r : shape[1] * (r + 1)] for r in range(shape[0])]


def flat(table):
    return [value for row in table for value in row]


def choice(params, name, default, allowed):
    value = params.pop(name, default)
    if value not in allowed:
        raise ValueError(f"param `{name}`: `{value}` is not one of {', '.join(allowed)}")
    return value


OFFERED = ("add", "silu_mul", "softmax", "rms_norm", "gemm")


def run(op, out, inputs, params):
    """(name of the output, its dtype, its shape, its values)"""
    take = lambda name: inputs.pop(name) if name in inputs else fail(f"input `{name}`: missing")
    if op == "add" or op == "silu_mul":
        a, b = (take("a"), take("b")) if op == "add" else (take("gate"), take("up"))
        if a[1] != b[1]:
            fail(f"shapes {a[1]} and {b[1]} must be equal")
        return out, a[1], (ops.add_op if op == "add" else ops.silu_mul)(a[2], b[2])
    if op == "softmax":
        x = take("x")
        return out, x[1], flat(ops.softmax(rows(x)))
    if op == "rms_norm":
        x, w = take("x"), take("w")
        if x[1][1:] != w[1]:
            fail(f"input `w`: shape {w[1]} must be [N] with the N of x, {x[1]}")
        rounding = choice(params, "rounding", "once", ("once", "hf"))
        offset = choice(params, "weight_offset", "0", ("0", "1", "false", "true")) in ("1", "true")
        eps = f32(float(params.pop("eps", "1e-6")))
        return out, x[1], flat(ops.rms_norm(rows(x), rows(w, 1), eps, rounding, offset, round_bf16))
    if op == "gemm":
        x, w, bias = take("x"), take("w"), inputs.pop("bias", None)
        (m, k), (n, k_of_w) = x[1], w[1]
        if k != k_of_w or (bias and bias[1] != [n]):
            fail(f"shapes x {x[1]}, w {w[1]}, bias {bias and bias[1]} must be [M, K], [N, K], [N]")
        k_offset, k_total = int(params.pop("k_offset", "0")), int(params.pop("k_total", k))
        held = ops.subtree(k, k_offset, k_total)
        if held is None:
            fail(f"columns {k_offset}..{k_offset + k} of {k_total} are no subtree of its eight segments")
        if k != k_total:
            # One rank's part of a longer sum: never rounded, and the bias belongs to the whole.
            out, bias = "F32", None
        y = ops.gemm(rows(x), rows(w), bias and rows(bias, 1), k_offset, k_total, *held)
        return out, [m, n], flat(y)
    fail(f"op `{op}`")


def fail(reason):
    raise ValueError(reason)


def answer(data):
    number = {}
    try:
        tensors, metadata = read_file(data)
        if "config.id" in metadata:
            number = {"id": metadata["config.id"]}
        params = {k: v for k, v in metadata.items() if k not in ("case", "format") and not k.startswith("config.")}
        op = params.pop("op", None) or fail("metadata `op`: missing")
        if op not in OFFERED:
            raise Unsupported(f"op `{op}` is not offered; use one of {', '.join(OFFERED)}")
        out = FLOATS.get(params.pop("out", "fp32")) or fail("metadata `out`: use bf16, fp16 or fp32")
        if params.pop("profile", "ieee") != "ieee" or params.pop("tf32", "disabled") != "disabled":
            raise Unsupported("only profile ieee with tf32 disabled is offered")
        inputs = {name: t for name, t in tensors.items() if not name.startswith("expect.")}
        dtypes = {t[0] for t in inputs.values()}
        if not dtypes <= NAMES.keys():
            fail(f"input dtypes {sorted(dtypes)}: use BF16, F16 or F32")
        if len(dtypes) > 1:
            raise Unsupported("inputs of different dtypes are not offered")
        name = "y"
        dtype, shape, values = run(op, out, inputs, params)
        if inputs or params:
            fail(f"{op} takes no {', '.join([*inputs, *params])}")
        said = {"status": "ok", "reason": "", "kernel": f"{op}/python", **number}
        return write_file({name: (dtype, shape, values)}, said)
    except Unsupported as e:
        return write_file({}, {"status": "unsupported", "reason": str(e), "kernel": "", **number})
    except ValueError as e:
        return write_file({}, {"status": "error", "reason": str(e), "kernel": "", **number})


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
