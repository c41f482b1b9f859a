"""The steps of ci/gpu that are more than one command: gpu_steps.py STEP PROGRAM OUT.

Exit code 0: right; 1: not right; 2: the step itself is broken; 3: something that it needs is missing, as its last line says.
"""

import json
import os
import re
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_file(data):
    """Metadata and tensors (dtype, shape, bytes) of a safetensors file."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    tensors = {
        name: (entry["dtype"], entry["shape"], body[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in header.items()
    }
    return metadata, tensors


def write_file(metadata, tensors):
    header, body = {"__metadata__": metadata}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def frame(data):
    return struct.pack("<Q", len(data)) + data


def request(path, out):
    metadata, tensors = read_file(path.read_bytes())
    inputs = {name: tensor for name, tensor in tensors.items() if not name.startswith("expect.")}
    return write_file({**metadata, "out": out}, inputs), tensors


def vectors(program, out):
    """Every vector, bit for bit."""
    files = sorted((ROOT / "tests/vectors").glob("*.safetensors"))
    flags = os.environ.get("VECTORS_FLAGS", "--cuda").split()
    running = subprocess.Popen([program, "answer", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    wrong, checked, kernels = [], 0, set()
    for path in files:
        for dtype in ("fp32", "bf16"):
            data, tensors = request(path, dtype)
            running.stdin.write(frame(data))
            running.stdin.flush()
            size = running.stdout.read(8)
            if len(size) < 8:
                print(f"the program ended at {path.stem}")
                return 2
            metadata, outputs = read_file(running.stdout.read(struct.unpack("<Q", size)[0]))
            kernels.add(metadata["kernel"])
            if metadata["status"] != "ok":
                wrong.append(f"{path.stem} {dtype}: {metadata['status']}: {metadata['reason']}")
                continue
            for name, (_, _, found) in outputs.items():
                narrow = tensors.get(f"expect.{name}_bf16") if dtype == "bf16" else None
                expected = (narrow or tensors[f"expect.{name}"])[2]
                checked += 1
                if found != expected:
                    wrong.append(f"{path.stem} {dtype}: `{name}` differs; kernel {metadata['kernel']}")
    running.stdin.close()
    running.wait()
    print("\n".join(sorted(kernels)))
    print("\n".join(wrong))
    print(f"{len(files)} files, {checked} outputs compared, {len(wrong)} wrong")
    return 1 if wrong or checked < 270 else 0


def seconds_of(torch, work):
    """The median of seven batches by the device's clock, as `samebits times` does it."""
    work()
    torch.cuda.synchronize()

    def batch(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(runs):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / runs

    runs = int(min(10_000, max(1, 0.02 / max(batch(1), 1e-6))))
    return statistics.median(batch(runs) for _ in range(7))


def torch_times(names):
    """The same workloads by torch and cuBLAS, and the bandwidth of a copy."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return {}, None, None
    if not torch.cuda.is_available():
        return {}, None, None
    found = {}

    def values(*shape, spread=1.0):
        return ((torch.rand(*shape, device="cuda", dtype=torch.float32) * 2 - 1) * spread).to(torch.bfloat16)

    a = values(8192, 8192)
    b = torch.empty_like(a)
    copy = 2 * a.numel() * 2 / seconds_of(torch, lambda: b.copy_(a))
    properties = torch.cuda.get_device_properties(0)
    for name in names:
        words = name.split()
        sizes = [int(size) for size in words[-1].split("x")]
        try:
            with torch.no_grad():
                if words[0] == "logprob":
                    x, target = values(*sizes, spread=20.0), torch.full((sizes[0],), 7, device="cuda")
                    work = lambda: F.cross_entropy(x, target, reduction="none")
                elif words[0] == "rms_norm":
                    x, w = values(*sizes), values(sizes[1])
                    work = lambda: F.rms_norm(x, (sizes[1],), w, 1e-6)
                elif words[0] == "add_rms_norm":
                    x, r, w = values(*sizes), values(*sizes), values(sizes[1])
                    work = lambda: F.rms_norm(x + r, (sizes[1],), w, 1e-6)
                elif words[0] == "silu_mul":
                    x, u = values(*sizes), values(*sizes)
                    work = lambda: F.silu(x) * u
                elif words[0] == "add":
                    x, u = values(*sizes), values(*sizes)
                    work = lambda: x + u
                elif words[0] == "softmax":
                    x = values(*sizes)
                    work = lambda: F.softmax(x, -1)
                elif words[0] == "gemm":
                    m, n, k = sizes
                    x = values(m, k)
                    # Weights in turn, as `samebits times` takes them.
                    copies = max(1, min(16, (256 << 20) // (2 * n * k)))
                    weights, turn = [values(n, k) for _ in range(copies)], [0]

                    def work():
                        turn[0] += 1
                        return F.linear(x, weights[turn[0] % copies])
                elif words[0] == "attention":
                    batch, keys = sizes
                    queries = 1 if words[1] == "decode" else keys
                    q = values(batch, 32, queries, 128)
                    k, v = values(batch, 8, keys, 128), values(batch, 8, keys, 128)
                    causal = words[1] == "prefill"
                    work = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                else:
                    continue
                found[name] = seconds_of(torch, work)
        except Exception as e:  # a workload that torch cannot do says so, and the others go on
            print(f"torch: {name}: {type(e).__name__}: {e}")
        torch.cuda.empty_cache()
    return found, copy, properties


# What docs/PERFORMANCE.md wants of an H200: a name, and what is compared with what.
TARGETS = {
    "logprob 4096x151936": ("seconds", 0.33e-3),
    "rms_norm 8192x8192": ("copy", 0.85),
    "silu_mul 8192x8192": ("copy", 0.85),
    "gemm 1x4096x4096": ("torch", 0.9),
    "gemm 4x4096x4096": ("torch", 0.9),
    "gemm 16x4096x4096": ("torch", 0.9),
    "gemm 1x12288x4096": ("torch", 0.9),
    "gemm 4x12288x4096": ("torch", 0.9),
    "gemm 16x12288x4096": ("torch", 0.9),
    "attention decode 1x32768": ("copy", 0.75),
    "attention decode 16x32768": ("copy", 0.75),
    "gemm 4096x4096x4096": ("fp32", 0.6),
}


def clock():
    """The highest clock of the multiprocessors, in Hz."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    try:
        return float(asked.stdout.split()[0]) * 1e6
    except (IndexError, ValueError):
        return None


def times(program, out):
    """Ours and torch's, one after the other on the same device."""
    ours = subprocess.run([program, "times", "--seconds", "35"], capture_output=True, text=True)
    print(ours.stderr)
    lines = [json.loads(line) for line in ours.stdout.splitlines()]
    timed = [line for line in lines if "seconds" in line]
    theirs, copy, properties = torch_times([line["name"] for line in timed])
    mhz = clock()
    peak = properties.multi_processor_count * 128 * 2 * mhz if properties and mhz else None
    table = ["| workload | ours | GB/s | TFLOP/s | torch | of the target | kernels |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for line in timed:
        name, seconds = line["name"], line["seconds"]
        line["torch_seconds"] = theirs.get(name)
        kind, wanted = TARGETS.get(name, (None, None))
        reached = {
            "seconds": lambda: wanted / seconds,
            "copy": lambda: line["gb_per_s"] * 1e9 / copy / wanted if copy else None,
            "torch": lambda: theirs[name] / seconds / wanted if name in theirs else None,
            "fp32": lambda: line["tflop_per_s"] * 1e12 / peak / wanted if peak else None,
            None: lambda: None,
        }[kind]()
        line["of_target"] = reached
        show = lambda value, form: "" if value is None else format(value, form)
        table.append(
            f"| {name} | {seconds * 1e6:.1f} us | {line['gb_per_s']:.0f} | {line['tflop_per_s']:.1f} | "
            f"{show(theirs.get(name) and theirs[name] * 1e6, '.1f')} us | {show(reached, '.2f')} | {line['kernels']} |"
        )
    if copy:
        table.append(f"\nA copy of 128 MiB moves {copy / 1e9:.0f} GB/s, read and written.")
    if peak:
        table.append(f"The fp32 peak at the highest clock is {peak / 1e12:.1f} TFLOP/s.")
    skipped = [line["name"] for line in lines if "not_timed" in line]
    if skipped:
        table.append("Not timed for want of time: " + ", ".join(skipped) + ".")
    Path(out, "times.md").write_text("\n".join(table) + "\n")
    facts = {"copy_bytes_per_s": copy, "fp32_peak": peak, "workloads": lines}
    Path(out, "times.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(table))
    return 0 if ours.returncode == 0 and timed else 2


# What a sanitizer runs beside the smallest vector of every kind: one for each kernel that those leave out.
SMALL = [
    "gemm-bf16-normal-4x127x9",
    "gemm-bf16-normal-17x187x21",
    "gemm-bf16-normal-3x896x40",
    "rms_norm-once-normal-3x255",
    "logprob-bf16-t1-3x128",
    "silu_mul-normal-1x7",
    "attention-normal-b2t6s20h2g2d32e32c0w0cap0",
    "attention-normal-b3t1s300h2g2d64e64c1w0cap0",
]


def every_kind():
    """SMALL, and the smallest file of every kind of vector: of one name but for the sizes at its end."""
    smallest = {}
    for file in sorted((ROOT / "tests/vectors").glob("*.safetensors"), key=lambda file: (file.stat().st_size, file.name)):
        smallest.setdefault(file.stem.rsplit("-", 1)[0], file.stem)
    return sorted({*SMALL, *smallest.values()})


# A unit, what stands there or in its headers, what is put there, and the tool that must complain.
FAULTS = [
    (
        "gemm.cu",
        "            left_of_segment = steps_of_segment;\n        }\n        __syncthreads();",
        "            left_of_segment = steps_of_segment;\n        }",
        "racecheck",
    ),
    (
        "attention.cu",
        "hidden = __any_sync(WHOLE_WARP, hidden);\n        __syncwarp();",
        "hidden = __any_sync(WHOLE_WARP, hidden);",
        "racecheck",
    ),
    ("gemm.cu", "y[row * n + column] = narrow<Out>(sum);", "y[row * n + column + (1ll << 33)] = narrow<Out>(sum);", "memcheck"),
]


def found(file):
    return next((ROOT / "ops/src").rglob(file)).read_text()


def sanitizer(program, out):
    tool = next((t for t in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer") if which(t)), None)
    if tool is None:
        print("NOT CHECKED: there is no compute-sanitizer")
        return 0
    names = every_kind()
    print(f"{len(names)} vectors, one of every kind among them")
    frames = b"".join(frame(request(ROOT / f"tests/vectors/{name}.safetensors", "bf16")[0]) for name in names)

    def run(check, environment):
        command = [tool, "--tool", check, "--error-exitcode", "77", program, "answer", "--cuda"]
        done = subprocess.run(command, input=frames, capture_output=True, env={**os.environ, **environment})
        text = (done.stdout + done.stderr).decode(errors="replace")
        return done.returncode, "\n".join(line for line in text.splitlines() if line.startswith("========="))

    bad = 0
    for check in ("memcheck", "racecheck", "synccheck"):
        code, log = run(check, {})
        print(f"{check}: exit code {code}\n{log[-1500:]}")
        if "not supported" in log.lower():
            print("NOT CHECKED: compute-sanitizer does not work here")
            return 0
        bad += code != 0
    for file, old, new, check in FAULTS:
        folder = Path(out, "faulty")
        folder.mkdir(exist_ok=True)
        text = found(file)
        for header in re.findall(r'#include "(.*)"\n', text):
            text = text.replace(f'#include "{header}"\n', found(header))
        if text.count(old) != 1:
            print(f"{file} does not hold `{old}` once")
            return 2
        (folder / file).write_text(text.replace(old, new))
        code, log = run(check, {"SAMEBITS_SOURCES": str(folder)})
        print(f"{check} of a fault in {file}: exit code {code}\n{log[-600:]}")
        bad += code != 77
        (folder / file).unlink()
    return 1 if bad else 0


def which(name):
    return subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True).returncode == 0


def probes(program, out):
    """In which order torch and cuBLAS add: FPRev's question, for sums of 32 and of 64 products."""
    try:
        import torch
    except ImportError:
        print("NOT CHECKED: there is no torch")
        return 0
    lines = ["| product | rows | terms | order |", "| --- | --- | --- | --- |"]
    for dtype, large in ((torch.bfloat16, 2.0**30), (torch.float32, 2.0**30)):
        for rows in (1, 128):
            for terms in (32, 64):
                pairs = [(i, j) for i in range(terms) for j in range(i + 1, terms)]
                weights = torch.ones(len(pairs), terms)
                for at, (i, j) in enumerate(pairs):
                    weights[at, i], weights[at, j] = large, -large
                x = torch.ones(rows, terms, device="cuda", dtype=dtype)
                torch.backends.cuda.matmul.allow_tf32 = False
                y = torch.nn.functional.linear(x, weights.to("cuda", dtype))[0].float().cpu().tolist()
                # What is added after i and j have met survives: the rest is the size of their smallest common subtree.
                size = {pair: terms - int(round(value)) for pair, value in zip(pairs, y)}
                first = [size[(0, j)] for j in range(1, terms)]
                if all(size[(i, j)] == j + 1 for i, j in pairs):
                    order = "one chain"
                elif all(size[(i, i + 1)] == 2 for i in range(0, terms, 2)):
                    order = "neighbours in pairs"
                else:
                    order = "smallest common subtrees of term 0: " + " ".join(map(str, first))
                lines.append(f"| {str(dtype)[6:]} | {rows} | {terms} | {order} |")
    Path(out, "probes.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


# The shape of Qwen3-0.6B.
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
PROMPT, SAMPLED = 32, 256


def decoder(folder, torch):
    """A model of that shape with random weights, in Hugging Face layout."""
    config = json.loads((ROOT / "tests/checkpoints/qwen3/config.json").read_text())
    config.update({name: value for name, value in SHAPE.items()})
    config.pop("layer_types", None)
    hidden, width, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * dim, SHAPE["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": [SHAPE["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, queries],
            "self_attn.q_norm": [dim],
            "self_attn.k_norm": [dim],
            "mlp.gate_proj": [width, hidden],
            "mlp.up_proj": [width, hidden],
            "mlp.down_proj": [hidden, width],
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    torch.manual_seed(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            values = torch.randn(*shape) * 0.02 if len(shape) == 2 else torch.ones(*shape)
            file.write(values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())


def decode(program, out):
    """Tokens a second of a model of the shape of Qwen3-0.6B at batch 1, ours beside transformers'."""
    try:
        import torch
    except ImportError:
        print("NOT TIMED: the model is made with torch, and there is none")
        return 0
    folder = Path(out, "decoder")
    decoder(folder, torch)
    prompt = [i * 7919 % 150000 for i in range(PROMPT)]
    prompts = Path(out, "prompts.jsonl")
    prompts.write_text(json.dumps({"tokens": prompt}) + "\n")

    def sample(device):
        command = [program, "rollout", "--model", folder, "--prompts", prompts, "--max-tokens", str(SAMPLED)]
        command += ["--temperature", "0", "--ignore-eos", "--times", "--device", device]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        print(done.stderr)
        if done.returncode:
            raise SystemExit(2)
        text = json.loads(done.stdout.splitlines()[1])
        rate = float(done.stderr.split("sampled tokens:")[1].split("(")[1].split("/s")[0])
        return rate, text["tokens"], text["logprobs"]

    rate, tokens, logprobs = sample("cuda")
    table = ["| decode, batch 1 | tokens/s |", "| --- | --- |", f"| samebits | {rate:.1f} |"]
    try:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
        ids = torch.tensor([prompt], device="cuda")
        options = dict(do_sample=False, min_new_tokens=SAMPLED, max_new_tokens=SAMPLED, pad_token_id=0)
        with torch.no_grad():
            model.generate(ids, **{**options, "min_new_tokens": 8, "max_new_tokens": 8})
            seconds = []
            for count in (8, SAMPLED):
                options.update(min_new_tokens=count, max_new_tokens=count)
                torch.cuda.synchronize()
                start = time.perf_counter()
                model.generate(ids, **options)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
        table.append(f"| transformers | {(SAMPLED - 8) / (seconds[1] - seconds[0]):.1f} |")
    except Exception as e:  # whatever is missing there says so, and ours stands
        table.append(f"| transformers | not timed: {type(e).__name__}: {str(e).splitlines()[0][:80]} |")
    Path(out, "decode.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    # The same tokens and the same bits by the processor; a few, for it takes longer.
    few = 8
    command = [program, "rollout", "--model", folder, "--prompts", prompts, "--max-tokens", str(few)]
    command += ["--temperature", "0", "--ignore-eos"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    text = json.loads(done.stdout.splitlines()[1])
    same = (text["tokens"], text["logprobs"]) == (tokens[:few], logprobs[:few])
    print(f"the processor's first {few} tokens and log-probabilities are {'the same' if same else 'OTHERS'}")
    (folder / "model.safetensors").unlink()
    return 0 if same else 1


def python(program, out):
    """CUDA tensors of torch through the Python module, of a wheel that was carried here."""
    wheels = sorted(ROOT.glob("target/wheels/samebits-*.whl"), key=os.path.getmtime)
    if not wheels:
        print("no wheel in target/wheels; build it with ci/wheel and carry it here")
        return 3
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", ROOT / "target/wheels"]
    try:
        import torch
    except ImportError:
        print("no torch")
        return 3
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device")
        return 3
    place = Path(out, "python")
    subprocess.run([*install, "--no-deps", "--target", place, wheels[-1]], check=True)
    try:
        import pytest  # noqa: F401
    except ImportError:
        if subprocess.run([*install, "--target", place, "pytest"]).returncode:
            print("no pytest, and no wheel of it in target/wheels")
            return 3
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "python/tests/cuda/tensors.py"]
    return 1 if subprocess.run(tests, env={**os.environ, "PYTHONPATH": path}).returncode else 0


STEPS = {
    "vectors": vectors, "times": times, "decode": decode, "sanitizer": sanitizer, "probes": probes, "python": python,
}

if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in STEPS:
        print(__doc__)
        sys.exit(2)
    sys.exit(STEPS[sys.argv[1]](*sys.argv[2:]))
