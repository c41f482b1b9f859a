"""The command `samebits`."""

import os
import signal
import sys
import sysconfig

from . import _native


def _program() -> str:
    """What starts this command again: the script beside the interpreter, or the one that was started."""
    name = "samebits.exe" if os.name == "nt" else "samebits"
    places = [sys.argv[0], os.path.join(os.path.dirname(sys.executable), name)]
    places.append(os.path.join(sysconfig.get_path("scripts"), name))
    for place in places:
        if os.path.basename(place) == name and os.access(place, os.X_OK):
            return os.path.abspath(place)
    return os.path.abspath(sys.argv[0])


def main() -> int:
    """Runs the command with the arguments of this process; its exit code."""
    # No Python code runs meanwhile that could see to it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    repository = os.path.join(os.path.dirname(__file__), "repository")
    return _native.command(_program(), sys.argv[1:], repository if os.path.isdir(repository) else None)


if __name__ == "__main__":
    sys.exit(main())
