"""Every op of the schema as a function.

Inputs go in by place or by name, as they lie: tensors of torch, numpy, or any library with `__dlpack__`, on the host.
Attributes go in by name. Outputs are of the library of the first input; `into` names the tensors to write instead.
No gradient is recorded: for that there is `samebits.torch`. The functions are made from the schema; `help` has the
shapes, dtypes and errors of each.
"""

from . import _native

_functions = _native.ops()
globals().update(_functions)

__all__ = list(_functions)
