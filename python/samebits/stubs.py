"""`python -m samebits.stubs` writes `ops.pyi` anew, from the schema; `--check` only looks whether it is current."""

import pathlib
import sys

from . import _native

PLACE = pathlib.Path(__file__).with_name("ops.pyi")


def main() -> int:
    """Exit code 1 where `--check` finds a difference."""
    if "--check" in sys.argv[1:]:
        if PLACE.read_text() == _native.stubs():
            return 0
        print(f"{PLACE} is not what the schema says; run python -m samebits.stubs", file=sys.stderr)
        return 1
    PLACE.write_text(_native.stubs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
