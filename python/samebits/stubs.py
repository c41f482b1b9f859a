"""`python -m samebits.stubs` writes `ops.pyi` anew, from the schema; `--check` only looks whether it is current."""

import pathlib
import sys

from . import _native

PLACE = pathlib.Path(__file__).with_name("ops.pyi")


def main() -> int:
    """`--check`: exit code 1 where they differ. A path: where to write them, of a checkout for example."""
    if "--check" in sys.argv[1:]:
        if PLACE.read_text() == _native.stubs():
            return 0
        print(f"{PLACE} is not what the schema says; run python -m samebits.stubs", file=sys.stderr)
        return 1
    pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else PLACE).write_text(_native.stubs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
