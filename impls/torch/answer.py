#!/usr/bin/env python3
"""Answers requests on stdin with torch until the end of input; docs/WIRE.md describes the pipe.

    answer.py [--device cpu|cuda] [--deterministic]

A request with `repeat` is timed: inputs stand in the form torch likes before the clock starts, and one call warms up.
"""

import ctypes
import json
import math
import re
import struct
import sys
import time

import torch
import torch.nn.functional as F

DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
if "--deterministic" in sys.argv[1:]:
    torch.use_deterministic_algorithms(True)
    if hasattr(torch.backends.mkldnn, "deterministic"):
        torch.backends.mkldnn.deterministic = True
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
VERSION = f"torch {torch.__version__}"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
PER_ROW = ("lse", "dlogprob")
NAMES = {dtype: name for name, dtype in STORED.items()}


class Unsupported(Exception):
    """A combination that this program does not offer."""


def fail(reason):
    raise ValueError(reason)


# Messages: a safetensors file each.

def read_file(data):
    """(tensors, metadata); the tensors share the memory of `data`, a bytearray."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + size]))
        metadata, tensors = header.pop("__metadata__", {}), {}
        for name, entry in header.items():
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            if name.startswith("expect."):
                continue
            dtype = STORED.get(entry["dtype"]) or fail(f"tensor `{name}`: use BF16, F16, F32 or I32")
            if not 0 <= begin <= end <= len(data) - 8 - size or end - begin != math.prod(shape) * dtype.itemsize:
                fail(f"tensor `{name}`: its bytes do not fit its shape")
            if begin == end:
                tensors[name] = torch.empty(shape, dtype=dtype)
            else:
                # clone: torch's own alignment.
                flat = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=8 + size + begin)
                tensors[name] = flat.reshape(shape).clone()
        return tensors, metadata
    except (struct.error, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ValueError(f"not a safetensors file: {e}") from e


def canonical(tensor):
    """The bytes of a tensor, every NaN the canonical one."""
    tensor = tensor.contiguous()
    if tensor.dtype.is_floating_point and tensor.isnan().any():
        tensor = tensor.masked_fill(tensor.isnan(), math.nan)
    return bytes(tensor.cpu().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def write_file(tensors, metadata):
    header, parts, at = {"__metadata__": metadata}, [], 0
    for name, tensor in tensors.items():
        parts.append(canonical(tensor))
        header[name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(parts[-1])]
        }
        at += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


# The clock.

def resident(field):
    """A line of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return int(re.search(rf"^{field}:\s+(\d+) kB", status.read(), re.MULTILINE).group(1)) << 10


def memory_at_rest():
    """Resident bytes, from which the largest size counts on; None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
            refs.write("5")
        return resident("VmRSS")
    except (OSError, AttributeError):
        return None


def timed(call, repeat):
    """(outputs, metadata) of `repeat` timed calls, or of a single one when `repeat` is 0."""
    if not repeat:
        return call(), {}
    before = memory_at_rest()
    outputs, seconds = call(), []
    for _ in range(repeat):
        outputs = None
        start = time.perf_counter()
        outputs = call()
        seconds.append(time.perf_counter() - start)
    metadata = {"seconds": json.dumps(seconds), "version": VERSION}
    if before is not None:
        metadata["peak_bytes"] = str(max(0, resident("VmHWM") - before))
    return outputs, metadata


def laid_out(tensor, layout):
    """The same elements, lying in memory as asked."""
    if layout == "offset":
        return torch.cat((tensor.new_zeros(1), tensor.reshape(-1)))[1:].view(tensor.shape)
    if layout == "strided":
        return torch.stack((tensor, torch.zeros_like(tensor)), -1)[..., 0]
    if layout == "transposed":
        return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))
    return tensor


# Ops. Each takes its inputs and parameters, lays everything out, and returns (names of the outputs, call, prepared); a
# call returns the outputs in that order. Whatever is not in the call is not timed.

class Request:
    """Inputs and parameters that must all be taken."""

    def __init__(self, op, out, tensors, params, layout=None):
        self.op, self.out, self.tensors, self.params = op, out, tensors, params
        self.layout = layout

    def input(self, name, axes, like=None, dtype=None):
        """The float input `name` with `axes` axes (any number if None) in `dtype` or the one that is computed in."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            fail(f"input `{name}`: missing")
        if not tensor.dtype.is_floating_point:
            fail(f"input `{name}`: dtype is i32; it must be bf16, fp16 or fp32")
        self.shape(name, tensor, axes, like)
        return laid_out(tensor.to(DEVICE, dtype or self.out), self.layout)

    def whole(self, name, axes, like=None):
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            fail(f"input `{name}`: missing")
        if tensor.dtype != torch.int32:
            fail(f"input `{name}`: dtype must be i32")
        self.shape(name, tensor, axes, like)
        return tensor.to(DEVICE).long()

    def shape(self, name, tensor, axes, like):
        shape = list(tensor.shape)
        if axes is not None and len(shape) != axes:
            fail(f"input `{name}`: shape {shape} must have {axes} axes")
        for axis, extent in enumerate(like or []):
            if extent is not None and shape[axis] != extent:
                fail(f"input `{name}`: shape {shape} must have {extent} at axis {axis}")

    def number(self, name, default, least=-math.inf):
        text = self.params.pop(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            fail(f"param `{name}`: `{text}` is not a finite number" + (f" of at least {least}" if least == 0 else ""))
        return value

    def choice(self, name, default, allowed):
        text = self.params.pop(name, default)
        if text not in allowed:
            fail(f"param `{name}`: `{text}` is not one of {', '.join(allowed)}")
        return text

    def only(self, name, text, default):
        """Leaves what torch has no op for to others."""
        if self.params.pop(name, default) != default:
            raise Unsupported(f"param `{name}`: only {text} is offered")


def gemm(r):
    x = r.input("x", 2)
    w = r.input("w", 2, [None, x.shape[1]])
    bias = r.input("bias", 1, [w.shape[0]]) if "bias" in r.tensors else None
    # A rank's part of a longer sum is a product like any other: torch has no order that says more.
    r.params.pop("k_offset", None)
    if r.params.pop("k_total", str(x.shape[1])) != str(x.shape[1]):
        x, w, bias = x.float(), w.float(), None
    return ["y"], lambda: [F.linear(x, w, bias)], ""


def gemm_dx(r):
    dy = r.input("dy", 2)
    w = r.input("w", 2, [dy.shape[1], None])
    r.params.pop("n_offset", None)
    if r.params.pop("n_total", str(dy.shape[1])) != str(dy.shape[1]):
        dy, w = dy.float(), w.float()
    return ["dx"], lambda: [dy @ w], ""


def gemm_dw(r):
    x = r.input("x", 2)
    dy = r.input("dy", 2, [x.shape[0], None])
    for name in ("mask", "carry"):
        if name in r.tensors:
            raise Unsupported(f"input `{name}`: only products without it are offered")
    return ["dw"], lambda: [dy.T @ x], "", lambda outputs: [outputs[0].float()]


def rms_norm(r):
    x = r.input("x", 2)
    w = r.input("w", 1, [x.shape[1]])
    eps = r.number("eps", 1e-6, 0)
    r.only("rounding", "once", "once")
    if r.choice("weight_offset", "0", ("0", "1", "false", "true")) in ("1", "true"):
        raise Unsupported("param `weight_offset`: only 0 is offered")
    return ["y"], lambda: [F.rms_norm(x, (x.shape[1],), w, eps)], ""


def add_rms_norm(r):
    x = r.input("x", 2)
    residual = r.input("residual", 2, x.shape)
    w = r.input("w", 1, [x.shape[1]])
    eps = r.number("eps", 1e-6, 0)
    r.only("rounding", "once", "once")
    if r.choice("weight_offset", "0", ("0", "1", "false", "true")) in ("1", "true"):
        raise Unsupported("param `weight_offset`: only 0 is offered")

    def call():
        total = x + residual
        return [F.rms_norm(total, (x.shape[1],), w, eps), total]

    return ["y", "sum"], call, ""


def attention(r):
    q = r.input("q", 4)
    batch, queries, heads, dim = q.shape
    k = r.input("k", 4, [batch, None, None, dim])
    keys, kv_heads = k.shape[1:3]
    v = r.input("v", 4, [batch, keys, kv_heads])
    q_pos, kv_len = r.whole("q_pos", 2, [batch, queries]), r.whole("kv_len", 1, [batch])
    if kv_heads == 0 or heads % kv_heads:
        fail(f"input `q`: Hq = {heads} must be a multiple of Hkv = {kv_heads}")
    if keys and not bool(((kv_len >= 0) & (kv_len <= keys)).all()):
        fail(f"input `kv_len`: every length must be 0 to {keys}")
    scale = r.number("scale", 1 / math.sqrt(max(dim, 1)), 0)
    causal = r.choice("causal", "0", ("0", "1", "false", "true")) in ("1", "true")
    r.only("window", "0", "0")
    r.only("chunk", "0", "0")
    if r.number("softcap", 0, 0):
        raise Unsupported("param `softcap`: only 0 is offered")
    # Heads before positions, as torch wants them.
    q, k, v = (t.transpose(1, 2) if r.layout else t.transpose(1, 2).contiguous() for t in (q, k, v))
    # Keys are hidden by a mask, unless torch's own flag or nothing at all says the same.
    last = torch.arange(keys - queries, keys, device=DEVICE)
    whole, mask = bool((kv_len == keys).all()), None
    plain = whole and (not causal or bool((q_pos >= keys - 1).all()))
    flag = not plain and whole and queries == keys and bool((q_pos == last).all())
    if not plain and not flag:
        key = torch.arange(keys, device=DEVICE)
        mask = (key < kv_len[:, None, None]).expand(batch, queries, keys)
        mask = (mask & (key <= q_pos[:, :, None]) if causal else mask)[:, None]

    def call():
        grouped = heads != kv_heads
        return [F.scaled_dot_product_attention(q, k, v, mask, 0.0, flag, scale=scale, enable_gqa=grouped)]

    def finish(outputs):
        # torch does not return the log-sum-exp: it is computed beside the clock, a head at a time.
        lse = torch.empty(batch, queries, heads, device=DEVICE)
        for b in range(batch):
            for h in range(heads):
                scores = q[b, h].float() @ k[b, h * kv_heads // heads].float().T * scale
                if flag:
                    scores.masked_fill_(torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(1), -math.inf)
                elif mask is not None:
                    scores.masked_fill_(~mask[b, 0], -math.inf)
                lse[b, :, h] = torch.logsumexp(scores, -1)
        return [outputs[0].transpose(1, 2), lse]

    return ["out", "lse"], call, "heads before positions", finish


def attention_backward(r):
    q = r.input("q", 4)
    batch, queries, heads, dim = q.shape
    k = r.input("k", 4, [batch, None, None, dim])
    keys, kv_heads = k.shape[1:3]
    v = r.input("v", 4, [batch, keys, kv_heads])
    rows = [batch, queries, heads]
    out, dout = r.input("out", 4, [*rows, v.shape[3]]), r.input("dout", 4, [*rows, v.shape[3]])
    lse = r.input("lse", 3, rows, torch.float32)
    q_pos, kv_len = r.whole("q_pos", 2, [batch, queries]), r.whole("kv_len", 1, [batch])
    if "mask" in r.tensors and not bool((r.whole("mask", 2, [batch, queries]) != 0).all()):
        raise Unsupported("input `mask`: rows that are no tokens are not offered")
    if kv_heads == 0 or heads % kv_heads:
        fail(f"input `q`: Hq = {heads} must be a multiple of Hkv = {kv_heads}")
    scale = r.number("scale", 1 / math.sqrt(max(dim, 1)), 0)
    causal = r.choice("causal", "0", ("0", "1", "false", "true")) in ("1", "true")
    r.only("window", "0", "0")
    r.only("chunk", "0", "0")
    if r.number("softcap", 0, 0):
        raise Unsupported("param `softcap`: only 0 is offered")
    last = torch.arange(keys - queries, keys, device=DEVICE)
    if not bool((kv_len == keys).all()) or causal and (queries != keys or not bool((q_pos == last).all())):
        raise Unsupported("input `kv_len`: only whole sequences are offered")
    group = heads // kv_heads
    # Heads before positions, as torch wants them; its backward knows no groups of heads.
    q, out, dout = (t.transpose(1, 2) if r.layout else t.transpose(1, 2).contiguous() for t in (q, out, dout))
    k, v = (t.transpose(1, 2) if r.layout else t.transpose(1, 2).contiguous() for t in (k, v))
    lse = lse.transpose(1, 2).contiguous()
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def call():
        wide_k, wide_v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        dq, dk, dv = backward(dout, q, wide_k, wide_v, out, lse, 0.0, causal, attn_mask=None, scale=scale)
        if group > 1:
            dk, dv = (t.unflatten(1, (kv_heads, group)).sum(2) for t in (dk, dv))
        return [dq, dk, dv]

    finish = lambda outputs: [t.transpose(1, 2) for t in outputs]
    return ["dq", "dk", "dv"], call, "heads before positions", finish


def log_softmax_of(logits, target):
    logp = torch.log_softmax(logits.float(), -1).gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    # A negative target is to be ignored.
    return logp.masked_fill(target < 0, 0) if bool((target < 0).any()) else logp


def targets(r, rows, vocab):
    target = r.whole("target", 1, [rows])
    if rows and not bool((target < vocab).all()):
        fail(f"input `target`: every token must be less than {vocab}")
    return target


def logprob(r):
    logits = r.input("logits", 2)
    target = targets(r, *logits.shape)
    temperature = r.number("temperature", 1)
    if temperature <= 0:
        fail("param `temperature`: must be greater than 0")

    def call():
        scaled = logits if temperature == 1 else logits.float() / temperature
        return [log_softmax_of(scaled, target)]

    finish = lambda outputs: [outputs[0], torch.logsumexp(logits.float() / temperature, -1)]
    return ["logprob", "lse"], call, "", finish


def entropy(r):
    logits = r.input("logits", 2)
    temperature = r.number("temperature", 1)
    if temperature <= 0:
        fail("param `temperature`: must be greater than 0")

    def call():
        scaled = logits if temperature == 1 else logits.float() / temperature
        logp = torch.log_softmax(scaled.float(), -1)
        # What torch.distributions.Categorical does with logits of -inf.
        return [-(logp.clamp(min=torch.finfo(torch.float32).min) * logp.exp()).sum(-1)]

    finish = lambda outputs: [outputs[0], torch.logsumexp(logits.float() / temperature, -1)]
    return ["entropy", "lse"], call, "", finish


def linear_logprob(r):
    x = r.input("x", 2)
    w = r.input("w", 2, [None, x.shape[1]])
    target = targets(r, x.shape[0], w.shape[0])
    temperature = r.number("temperature", 1)
    if temperature != 1:
        raise Unsupported("param `temperature`: only 1 is offered")
    call = lambda: [log_softmax_of(F.linear(x, w), target)]
    finish = lambda outputs: [outputs[0], torch.logsumexp(F.linear(x, w).float(), -1)]
    return ["logprob", "lse"], call, "", finish


def linear_logprob_backward(r):
    x = r.input("x", 2)
    rows = [x.shape[0]]
    w = r.input("w", 2, [None, x.shape[1]])
    target = targets(r, x.shape[0], w.shape[0])
    lse, dlogprob = (r.input(name, 1, rows, torch.float32)[:, None] for name in ("lse", "dlogprob"))
    if r.number("temperature", 1) != 1:
        raise Unsupported("param `temperature`: only 1 is offered")
    for name in ("dlse", "mask", "carry"):
        if name in r.tensors:
            raise Unsupported(f"input `{name}`: only gradients without it are offered")
    dlogprob = dlogprob.masked_fill(target[:, None] < 0, 0)

    def call():
        # What autograd runs, in less memory: each step in the place of the one before.
        dz = F.linear(x, w).float().sub_(lse).exp_().mul_(-dlogprob)
        dz = dz.scatter_add_(1, target.clamp(min=0)[:, None], dlogprob).to(x.dtype)
        return [dz @ w, dz.T @ x]

    return ["dx", "dw"], call, "", lambda outputs: [outputs[0], outputs[1].float()]


def softmax(r):
    x = r.input("x", 2)
    return ["y"], lambda: [torch.softmax(x, -1)], ""


def silu_mul(r):
    gate = r.input("gate", None)
    up = r.input("up", gate.dim(), gate.shape)
    return ["y"], lambda: [F.silu(gate) * up], ""


def rope(r):
    x = r.input("x", 3)
    tokens, _, dim = x.shape
    pos = r.whole("pos", 1, [tokens])
    if dim % 2:
        fail(f"input `x`: D = {dim} must be even, RoPE turns pairs of elements")
    theta = r.number("theta", 10000)
    if theta <= 0:
        fail("param `theta`: must be greater than 0")
    r.only("pairing", "half", "half")
    angles = pos[:, None].double() * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=DEVICE) / max(dim, 1))
    cos, sin = (f(torch.cat((angles, angles), -1))[:, None].to(r.out) for f in (torch.cos, torch.sin))

    def call():
        # As transformers applies it.
        low, high = x.chunk(2, -1)
        return [x * cos + torch.cat((-high, low), -1) * sin]

    return ["y"], call, "sines and cosines tabled"


def add(r):
    a = r.input("a", None)
    b = r.input("b", a.dim(), a.shape)
    return ["y"], lambda: [a + b], ""


def embedding(r):
    w = r.input("w", 2)
    tokens = r.whole("tokens", 1)
    if tokens.numel() and not bool(((tokens >= 0) & (tokens < w.shape[0])).all()):
        fail(f"input `tokens`: every token must be 0 to {w.shape[0] - 1}")
    return ["y"], lambda: [F.embedding(tokens, w)], ""


def argmax(r):
    x = r.input("x", 2)
    if x.shape[1] == 0:
        fail("input `x`: N must be at least 1")
    finish = lambda outputs: [outputs[0].to(torch.int32)]
    return ["index"], lambda: [x.argmax(-1)], "", finish


OPS = {
    f.__name__: f
    for f in (
        gemm, gemm_dx, gemm_dw, rms_norm, add_rms_norm, attention, attention_backward, logprob, entropy, linear_logprob,
        linear_logprob_backward, softmax, silu_mul, rope, add, embedding, argmax,
    )
}


def count(metadata, key, most):
    text = metadata.pop(key, None)
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        fail(f"metadata `{key}`: `{text}` is not a whole number from 1 to {most}")
    return int(text)


ALL_CORES = torch.get_num_threads()


def run(tensors, metadata):
    if not all(isinstance(value, str) for value in metadata.values()):
        fail("metadata: every value must be a string")
    op = metadata.pop("op", None) or fail("metadata `op`: missing; name the op, for example gemm")
    if op not in OPS:
        raise Unsupported(f"op `{op}` is not offered; use one of {', '.join(OPS)}")
    out = metadata.pop("out", "fp32")
    if out not in ("bf16", "fp16", "fp32"):
        fail(f"metadata `out`: `{out}` is not bf16, fp16 or fp32")
    threads = count(metadata, "config.threads", 1024)
    torch.set_num_threads(threads or ALL_CORES)
    repeat = count(metadata, "repeat", 1_000_000)
    layout = metadata.pop("config.layout", None)
    if layout not in (None, "offset", "strided", "transposed"):
        fail(f"metadata `config.layout`: `{layout}` is not offset, strided or transposed")
    if "config.isa" in metadata:
        raise Unsupported("`config.isa`: torch chooses by itself; leave it out")
    params = {k: v for k, v in metadata.items() if k not in ("case", "format") and not k.startswith("config.")}
    if params.pop("profile", "ieee") != "ieee":
        raise Unsupported("param `profile`: only ieee is offered")
    if params.pop("tf32", "disabled") != "disabled":
        raise Unsupported("param `tf32`: only disabled is offered")
    # What has a number for each row is f32 whatever the others are.
    floats = {t.dtype for name, t in tensors.items() if t.dtype.is_floating_point and name not in PER_ROW}
    if len(floats) > 1:
        raise Unsupported("inputs of different dtypes are not offered")
    given = floats.pop() if floats else torch.float32
    if out not in DTYPES or given not in DTYPES.values() or (given, out) == (torch.float32, "bf16"):
        raise Unsupported("only bf16 to bf16, bf16 to fp32 and fp32 to fp32 are offered")
    request = Request(op, DTYPES[out], tensors, params, layout)
    names, call, prepared, *finish = OPS[op](request)
    if tensors or params:
        fail(f"{op} takes no {', '.join(f'`{name}`' for name in [*tensors, *params])}")
    if given != DTYPES[out]:
        prepared = ", ".join(filter(None, ("inputs widened to fp32", prepared)))
    outputs, reading = timed(call, repeat)
    outputs = finish[0](outputs) if finish else outputs
    if reading:
        reading["prepared"] = prepared
    metadata = {"status": "ok", "reason": "", "kernel": f"{op}/torch-{DEVICE}", **reading}
    if layout:
        metadata["layout"] = layout
    if threads and DEVICE == "cpu":
        metadata["threads"] = str(threads)
    return dict(zip(names, outputs)), metadata


def answer(data):
    number = {}
    try:
        tensors, metadata = read_file(data)
        if "config.id" in metadata:
            number = {"id": metadata["config.id"]}
        with torch.inference_mode():
            outputs, said = run(tensors, metadata)
            return write_file(outputs, {**said, **number})
    except Unsupported as e:
        return write_file({}, {"status": "unsupported", "reason": str(e), "kernel": "", **number})
    except (ValueError, RuntimeError, MemoryError) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        return write_file({}, {"status": "error", "reason": reason, "kernel": "", **number})


def read_exactly(pipe, size):
    """Up to `size` bytes, fewer at the end of input. Memory grows with what arrives."""
    data = bytearray()
    while len(data) < size and (part := pipe.read(min(size - len(data), 1 << 24))):
        data += part
    return data


def main():
    pipe, out = sys.stdin.buffer, sys.stdout.buffer
    while head := read_exactly(pipe, 8):
        if len(head) < 8:
            sys.exit("input ends inside the length of a frame")
        (size,) = struct.unpack("<Q", head)
        if size > 8 << 30:
            sys.exit(f"a frame claims {size} bytes; the limit is 8 GiB")
        data = read_exactly(pipe, size)
        if len(data) < size:
            sys.exit("input ends inside a frame")
        reply = answer(data)
        out.write(struct.pack("<Q", len(reply)))
        out.write(reply)
        out.flush()


if __name__ == "__main__":
    main()
