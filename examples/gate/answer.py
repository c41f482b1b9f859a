#!/usr/bin/env python3
"""A program on the wire: rms_norm of bf16 in plain Python. docs/GATE.md makes a gate of it.

Its kernel is wrong on purpose: for more than two rows it keeps partial sums in bf16. `mended` is what it should be.
"""

import json
import math
import struct
import sys


def widen(data):
    """The numbers of bytes that hold bf16: the upper half of an f32."""
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))


def bf16(value):
    """The bits of the bf16 that is nearest, of two the even one; a NaN is 0x7FC0 and no other."""
    if math.isnan(value):
        return 0x7FC0
    if not math.isinf(value):
        # Eight bits of precision, fewer below the smallest normal number.
        unit = 2.0 ** max(math.frexp(value)[1] - 8, -133)
        value = math.copysign(round(value / unit) * unit, value)
        if abs(value) >= 2.0**128:
            value = math.copysign(math.inf, value)
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def mended(row, rows):
    return math.fsum(v * v for v in row)


def broken(row, rows):
    if rows <= 2:
        return mended(row, rows)
    blocks = [math.fsum(v * v for v in row[i : i + 32]) for i in range(0, len(row), 32)]
    return math.fsum(widen(struct.pack(f"<{len(blocks)}H", *map(bf16, blocks))))


sum_of_squares = broken


def rms_norm(x, w, shape, eps):
    rows, n = shape
    y = []
    for r in range(rows):
        row = x[r * n : (r + 1) * n]
        mean = sum_of_squares(row, rows) / n + eps
        scale = 1 / math.sqrt(mean) if mean > 0 else math.nan if mean != mean else math.inf
        y += [bf16(v * scale * g) for v, g in zip(row, w)]
    return struct.pack(f"<{len(y)}H", *y)


class Unsupported(Exception):
    """What this program does not offer."""


def run(metadata, tensors):
    """The output y, and its shape."""
    if metadata["op"] != "rms_norm":
        raise Unsupported(f"op {metadata['op']}: only rms_norm is offered")
    if metadata.get("out") != "bf16" or any(dtype != "BF16" for dtype, _, _ in tensors.values()):
        raise Unsupported("only bf16 to bf16 is offered")
    if metadata.get("rounding", "once") != "once":
        raise Unsupported("rounding hf is not offered")
    (_, shape, x), (_, _, w) = tensors["x"], tensors["w"]
    x, w = widen(x), widen(w)
    if metadata.get("weight_offset", "0") in ("1", "true"):
        w = [g + 1 for g in w]
    return shape, rms_norm(x, w, shape, float(metadata.get("eps", "1e-6")))


def answer(request):
    (size,) = struct.unpack_from("<Q", request)
    header, body = json.loads(request[8 : 8 + size]), request[8 + size :]
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        if not name.startswith("expect."):
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], body[begin:end])
    said, outputs, data = {"status": "ok", "reason": "", "kernel": "rms_norm/example"}, {}, b""
    try:
        shape, data = run(metadata, tensors)
        outputs = {"y": {"dtype": "BF16", "shape": shape, "data_offsets": [0, len(data)]}}
    except Unsupported as e:
        said |= {"status": "unsupported", "reason": str(e)}
    if "config.id" in metadata:
        said["id"] = metadata["config.id"]
    text = json.dumps({"__metadata__": said, **outputs}).encode()
    return struct.pack("<Q", len(text)) + text + data


def main():
    pipe, out = sys.stdin.buffer, sys.stdout.buffer
    while head := pipe.read(8):
        reply = answer(pipe.read(struct.unpack("<Q", head)[0]))
        out.write(struct.pack("<Q", len(reply)) + reply)
        out.flush()


if __name__ == "__main__":
    main()
