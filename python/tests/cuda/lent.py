"""DLPack capsules of a GPU's memory, and tensors of torch that lend them."""

import ctypes

import torch

_CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32)}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]  # fmt: skip


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# What capsules point to, until they are given back.
held = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address):
    del held[address]


def capsule(owner, address, shape, strides, dtype, device):
    code, bits = _CODES[dtype]
    numbers = [(ctypes.c_int64 * max(len(of), 1))(*of) for of in (shape, strides)]
    lent = _Versioned(1, 0, None, ctypes.cast(_delete, ctypes.c_void_p), 0)
    lent.tensor = _Tensor(address, 2, device, len(shape), code, bits, 1, *numbers, 0)
    held[ctypes.addressof(lent)] = (lent, numbers, owner)
    return _new(ctypes.addressof(lent), b"dltensor_versioned", None)


def _dense(shape):
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.insert(0, stride)
        stride *= extent
    return strides


class Capsule:
    """A tensor of a library that nobody knows, on a GPU."""

    def __init__(self, address, shape, dtype=torch.float32, device=0, owner=None):
        self.address, self.shape, self.dtype, self.place, self.owner, self.streams = address, shape, dtype, device, owner, []

    def __dlpack_device__(self):
        return 2, self.place

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        return capsule(self.owner, self.address, self.shape, _dense(self.shape), self.dtype, self.place)


class Lent(torch.Tensor):
    """A tensor of torch that is on a GPU for its dispatcher, and whose elements are memory of the library: what torch on a
    machine with a GPU has in itself."""

    @staticmethod
    def of(memory, dtype, shape, strides=None, offset=0):
        meta = torch.empty_strided(shape, _dense(shape) if strides is None else strides, dtype=dtype, device="meta")
        self = torch.Tensor._make_subclass(Lent, meta, False, device_for_backend_keys=torch.device("cuda", memory.device))
        self.memory, self.offset, self.streams = memory, offset, []
        return self

    @property
    def device(self):
        return torch.device("cuda", self.memory.device)

    def data_ptr(self):
        return self.memory.address + self.offset * self.itemsize

    def view_at(self, shape, strides, offset):
        return Lent.of(self.memory, self.dtype, shape, strides, offset)

    def __dlpack_device__(self):
        return 2, self.memory.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.memory.lent_on(stream)
        return capsule(self.memory, self.data_ptr(), self.shape, self.stride(), self.dtype, self.memory.device)

    def new_empty(self, shape, dtype=None):
        return self.memory.machine.empty(tuple(shape), dtype or self.dtype, self.memory.device)

    def detach(self):
        return self.view_at(self.shape, self.stride(), self.offset)

    def clone(self):
        made = self.new_empty(self.shape)
        self.memory.machine.copy_rows(self, made)
        return made

    def contiguous(self):
        return self if self.is_contiguous() else self.clone()

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        assert self.is_contiguous()
        return self.view_at(tuple(shape), None, self.offset)

    def to(self, dtype):
        assert dtype == self.dtype
        return self

    def cpu(self):
        return self.memory.machine.get(self)
