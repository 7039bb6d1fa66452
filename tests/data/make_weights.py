#!/usr/bin/env python3
"""Writes the files of weights in this folder, byte for byte in the form in which torch.save and safetensors.torch.save_file write them.

Needs neither of them: classes of the same names stand for PyTorch's, and Python's own pickler writes what they are made of. Run it in
this folder after a change; the numbers in the tensors are what tests/train/weights/weights_test.cpp expects.
"""

import collections
import io
import json
import pickle
import struct
import sys
import types
import zlib

torch = types.ModuleType("torch")
utils = types.ModuleType("torch._utils")
storage_module = types.ModuleType("torch.storage")
sys.modules.update({"torch": torch, "torch._utils": utils, "torch.storage": storage_module})


def named(module, name, value):
    value.__module__, value.__qualname__, value.__name__ = module.__name__, name, name
    setattr(module, name, value)
    return value


def stub(module, name):
    return named(module, name, lambda *arguments: None)


rebuild_tensor = stub(utils, "_rebuild_tensor_v2")
rebuild_typed = stub(utils, "_rebuild_tensor_v3")
rebuild_parameter = stub(utils, "_rebuild_parameter")
UNTYPED = named(storage_module, "UntypedStorage", type("UntypedStorage", (), {}))
STORAGES = {}  # dtype: class and format of struct
for dtype, name, form in [("F32", "Float", "f"), ("F64", "Double", "d"), ("F16", "Half", "e"), ("BF16", "BFloat16", "H"),
                          ("I64", "Long", "q"), ("I32", "Int", "i"), ("U8", "Byte", "B"), ("BOOL", "Bool", "?")]:
    STORAGES[dtype] = (named(torch, name + "Storage", type(name + "Storage", (), {})), form)


class Dtype:  # pickled by name, as torch.int32 is
    def __init__(self, name):
        self.name = name


def element(dtype, value):  # a bfloat16 is the upper half of a float32
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16 if dtype == "BF16" else value


class Storage:
    def __init__(self, dtype, values):
        self.dtype, self.values = dtype, values

    def bytes(self):
        form = STORAGES[self.dtype][1]
        return b"".join(struct.pack("<" + form, element(self.dtype, value)) for value in self.values)


def row_major(shape):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return tuple(strides)


class Tensor:
    def __init__(self, storage, shape, strides=None, offset=0, typed=None):
        self.storage, self.shape, self.offset, self.typed = storage, shape, offset, typed
        self.strides = row_major(shape) if strides is None else strides

    def __reduce_ex__(self, protocol):
        arguments = (self.storage, self.offset, self.shape, self.strides, False, collections.OrderedDict())
        return (rebuild_typed, arguments + (self.typed,)) if self.typed else (rebuild_tensor, arguments)


class Parameter:
    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return (rebuild_parameter, (self.data, True, collections.OrderedDict()))


class Pickler(pickle._Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.storages = []

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        if value not in self.storages:
            self.storages.append(value)
        untyped = value.dtype == "U8" and getattr(value, "untyped", False)
        kind = UNTYPED if untyped else STORAGES[value.dtype][0]
        return ("storage", kind, str(self.storages.index(value)), "cpu", len(value.values))

    def save_global(self, value, name=None):  # the pickler would look for torch's modules in packages
        module = value.__module__
        if self.proto >= 4:
            self.save(module)
            self.save(value.__name__)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{module}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch = dict(pickle._Pickler.dispatch)
    dispatch[types.FunctionType] = save_global
    dispatch[type] = save_global


def save_dtype(pickler, value):
    pickler.write(pickle.GLOBAL + f"torch\n{value.name}\n".encode())
    pickler.memoize(value)


Pickler.dispatch[Dtype] = save_dtype


def zip_of(entries):
    """As PyTorch's writer: no compression, bytes at multiples of 64, sizes behind the data, a zip64 end."""
    out, central = b"", b""
    for name, data in entries:
        name = name.encode()
        begin = len(out)
        padding = -(begin + 30 + len(name) + 4) % 64
        extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        out += struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra + data
        crc = zlib.crc32(data)
        out += struct.pack("<4s3I", b"PK\7\10", crc, len(data), len(data))
        central += struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 0, 0x0808, 0, 0, 0, crc, len(data), len(data), len(name), 0, 0, 0, 0, 0,
                               begin) + name
    at, count = len(out), len(entries)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, len(central), at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + len(central), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(central), at, 0)
    return out + central + end64 + locator + end


def torch_save(value, path, protocol=2):
    file = io.BytesIO()
    pickler = Pickler(file, protocol)
    pickler.dump(value)
    folder = path.rsplit(".", 1)[0]
    entries = [("data.pkl", file.getvalue()), ("byteorder", b"little")]
    entries += [(f"data/{i}", storage.bytes()) for i, storage in enumerate(pickler.storages)]
    entries += [("version", b"3\n"), (".data/serialization_id", b"1" * 40)]
    with open(path, "wb") as out:
        out.write(zip_of([(f"{folder}/{name}", data) for name, data in entries]))


def safetensors_save(tensors, path):
    """`tensors`: name: (dtype, shape, values). Wide dtypes first, then by name, as safetensors orders them."""
    order = sorted(tensors, key=lambda name: (-struct.calcsize("<" + STORAGES[tensors[name][0]][1]), name))
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name in order:
        dtype, shape, values = tensors[name]
        begin = len(data)
        data += Storage(dtype, values).bytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)


class StateDict(collections.OrderedDict):
    """Pickled as the OrderedDict with the attribute _metadata that Module.state_dict() returns."""

    def __reduce_ex__(self, protocol):
        attributes = {"_metadata": collections.OrderedDict([("", {"version": 1}), ("fc", {"version": 1})])}
        return (collections.OrderedDict, (), attributes, None, iter(self.items()))


def main():
    weight = Storage("F32", [i / 4 for i in range(12)])
    shared = Storage("F32", [100 + i for i in range(8)])
    state = StateDict()
    state["fc.weight"] = Tensor(weight, (3, 4))
    state["fc.bias"] = Parameter(Tensor(Storage("F32", [-1, 0, 1]), (3,)))
    state["turned"] = Tensor(weight, (4, 3), (1, 4))           # fc.weight.t(): the same storage
    state["part"] = Tensor(shared, (2, 2), (4, 1), 1)          # of a 2 x 4 matrix, the columns 1 and 2
    state["half"] = Tensor(Storage("F16", [0.5, -2.0]), (2,))
    state["brain"] = Tensor(Storage("BF16", [1.5, -3.0, 256.0]), (3,))
    state["steps"] = Tensor(Storage("I64", [-7]), ())
    state["mask"] = Tensor(Storage("BOOL", [True, False]), (2,))
    state["empty"] = Tensor(Storage("F32", []), (0, 5))
    torch_save(state, "state_dict.pt")

    model = StateDict([("fc.weight", Tensor(Storage("F32", range(6)), (2, 3))), ("fc.bias", Tensor(Storage("F32", [7, 8]), (2,)))])
    moments = {0: {"step": 5, "exp_avg": Tensor(Storage("F32", range(6)), (2, 3))}}
    checkpoint = {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}]},
                  "epoch": 3, "large": 1 << 70, "loss": 0.25, "note": "trained", "best": None, "done": False}
    torch_save(checkpoint, "checkpoint.pt", 4)

    untyped = Storage("U8", list(struct.pack("<4i", 1, -2, 3, -4)))
    untyped.untyped = True
    torch_save({"numbers": Tensor(untyped, (2,), (2,), 1, Dtype("int32"))}, "untyped.pt")

    # Conv1D: input features first.
    safetensors_save({"h.0.c_attn.weight": ("F32", [2, 6], [float(i) for i in range(12)]),
                      "h.0.c_attn.bias": ("F32", [6], [0.5 * i for i in range(6)]),
                      "wte.weight": ("BF16", [3, 2], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
                      "h.0.mask": ("BOOL", [3], [True, False, True])}, "gpt2.safetensors")


if __name__ == "__main__":
    main()
