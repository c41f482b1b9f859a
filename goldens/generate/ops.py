#!/usr/bin/env python3
"""Answers cases with torch and writes what it answers as goldens, for `samebits goldens import`.

    python goldens/generate/ops.py OUT [--op gemm ..] [--case 'gemm/fp32/*' ..] [--samebits PROGRAM]
    samebits goldens import OUT --store goldens-of-torch --reason WHY
    samebits check --slice quick --impl torch/cpu --judgment golden --goldens goldens-of-torch

The cases are the quick ones, asked of `samebits list` and `samebits case`; torch's ops are those of impls/torch. A case that
torch does not offer is left out. OUT gets a safetensors file a case, with its maker, command and date, and SHA256SUMS.
"""

import argparse
import datetime
import hashlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "impls/torch"))
arguments, sys.argv = sys.argv[1:], sys.argv[:1]

import torch  # noqa: E402

import answer  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--samebits", default=str(REPOSITORY / "target/release/samebits"))
    args = parser.parse_args(arguments)
    filters = [word for op in args.op for word in ("--op", op)] + [word for c in args.case for word in ("--case", c)]

    def samebits(*words):
        return subprocess.run([args.samebits, *words], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout

    told = {
        "maker": f"torch {torch.__version__}",
        "command": shlex.join(["goldens/generate/ops.py", *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    sums, left_out = [], 0
    for line in samebits("list", "--slice", "quick", "--json", *filters).splitlines():
        case = json.loads(line)["name"]
        frame = bytearray(samebits("case", case))
        try:
            with torch.inference_mode():
                outputs, _ = answer.run(*answer.read_file(frame[8:]))
        except answer.Unsupported:
            left_out += 1
            continue
        data = answer.write_file(outputs, {"case": case, **told})
        name = re.sub(r"[^\w.-]", "-", case) + ".safetensors"
        (args.out / name).write_bytes(data)
        sums.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    if not sums:
        sys.exit("torch offers none of these cases")
    (args.out / "SHA256SUMS").write_text("".join(sums))
    print(f"{len(sums)} cases in {args.out}, {left_out} not offered")


if __name__ == "__main__":
    main()
