#!/usr/bin/env python3
"""Files and numbers of the installed PyTorch, for tests/train/python_test.cpp. Exit code 77: there is no torch here.

    python_torch.py write FOLDER   writes the files below; those in this folder were written so, by PyTorch 1.13
    python_torch.py read FOLDER    reads what the test has written there, checks it, and writes answer.pt

  python_state_2.pt .. _5.pt  a state dict by pickle protocols 2 to 5: every dtype, strides, offsets, tied tensors, empty ones
  python_optim.pt             a training with each optimizer: gradients, parameters and state dicts, before and after
  python_schedules.pt         the learning rates of each schedule of torch.optim.lr_scheduler
  python_script.pt            a scripted model; python_script_run.pt: its data, losses and parameters in a training
"""

import collections
import json
import math
import os
import struct
import sys

try:
    import torch
except ImportError:
    sys.exit(77)

STEPS = 10  # of an optimizer; its state dict is taken in the middle


def numbers(shape, seed, dtype=torch.float32):
    count = math.prod(shape)
    return torch.tensor([math.sin(1.7 * i + seed) for i in range(count)], dtype=torch.float64).reshape(shape).to(dtype)


def state():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tied = torch.nn.Parameter(torch.arange(6, dtype=torch.float32).reshape(2, 3) - 2.5)
    result = collections.OrderedDict()
    for name in ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"]:
        result["dtype." + name] = torch.arange(5).to(getattr(torch, name)) * 3
    result["dtype.bool"] = torch.tensor([True, False, True])
    result["whole"] = base
    result["turned"] = base.t()
    result["part"] = base[1:3, 2:5]
    result["stepped"] = base[::2, ::3]
    result["expanded"] = torch.tensor([7.0]).expand(3, 2)
    result["channels_last"] = torch.arange(24, dtype=torch.float32).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    result["embed.weight"] = tied
    result["head.weight"] = tied
    result["scalar"] = torch.tensor(-7)
    result["empty"] = torch.zeros(0, 5)
    return result


OPTIMIZERS = {  # the test has the same table
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd_dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.2, eps=1e-6),
}


def parameters():
    return [numbers((3, 5), 1).requires_grad_(), numbers((7,), 2).requires_grad_()]


def train(optimizer, values, steps):
    for step in steps:
        for i, value in enumerate(values):
            value.grad = numbers(value.shape, 100 * step + i)
        optimizer.step()


def flat(state_dict):
    """As maniple::optim::state_dict names it."""
    result = {}
    for number, fields in state_dict["state"].items():
        for name, value in fields.items():
            if value is not None:
                value = torch.as_tensor(value, dtype=torch.float32 if name == "step" else None)
                result[f"state.{number}.{name}"] = value.clone()  # steps go on in the tensor itself
    for number, group in enumerate(state_dict["param_groups"]):
        for name, value in group.items():
            if value is not None:
                kind = torch.int64 if name == "params" else torch.bool if isinstance(value, bool) else torch.float64
                result[f"param_groups.{number}.{name}"] = torch.tensor(value, dtype=kind)
    return result


def optimizers():
    result = {}
    for step in range(STEPS):
        for i, value in enumerate(parameters()):
            result[f"gradient.{step}.{i}"] = numbers(value.shape, 100 * step + i)
    for name, make in OPTIMIZERS.items():
        values = parameters()
        optimizer = make(values)
        for begin in (0, STEPS // 2):
            for i, value in enumerate(values):
                result[f"{name}.{begin}.parameter.{i}"] = value.detach().clone()
            result.update({f"{name}.{begin}.{key}": value for key, value in flat(optimizer.state_dict()).items()} if begin else {})
            train(optimizer, values, range(begin, begin + STEPS // 2))
        for i, value in enumerate(values):
            result[f"{name}.{STEPS}.parameter.{i}"] = value.detach().clone()
        result.update({f"{name}.{STEPS}.{key}": value for key, value in flat(optimizer.state_dict()).items()})
    return result


def schedules():
    lr = torch.optim.lr_scheduler
    makers = {
        "linear": lambda o: lr.LinearLR(o, start_factor=0.1, end_factor=0.9, total_iters=7),
        "constant": lambda o: lr.ConstantLR(o, factor=0.25, total_iters=4),
        "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=12, eta_min=0.02),
        "cosine_restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.01),
        "one_cycle": lambda o: lr.OneCycleLR(o, max_lr=0.8, total_steps=30),
        "one_cycle_three": lambda o: lr.OneCycleLR(o, max_lr=0.8, total_steps=30, pct_start=0.4, anneal_strategy="linear", three_phase=True),
        "step": lambda o: lr.StepLR(o, step_size=4, gamma=0.5),
        "multi_step": lambda o: lr.MultiStepLR(o, milestones=[3, 8, 20], gamma=0.3),
        "exponential": lambda o: lr.ExponentialLR(o, gamma=0.93),
        "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
        "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, start_factor=0.1, total_iters=5), lr.ExponentialLR(o, gamma=0.9)], milestones=[5]),
        "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, factor=0.1, total_iters=6), lr.ExponentialLR(o, gamma=0.9)]),
    }
    if hasattr(lr, "PolynomialLR"):
        makers["polynomial"] = lambda o: lr.PolynomialLR(o, total_iters=20, power=1.5)
    result = {}
    for name, make in makers.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4, momentum=0.9)
        scheduler = make(optimizer)
        rates, momenta = [], []
        for step in range(30):
            rates.append(optimizer.param_groups[0]["lr"])
            momenta.append(optimizer.param_groups[0]["momentum"])
            optimizer.step()
            if step < 29:
                scheduler.step()
        result[name] = torch.tensor(rates, dtype=torch.float64)
        if name.startswith("one_cycle"):
            result[name + ".momentum"] = torch.tensor(momenta, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    plateau = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, cooldown=1, threshold=0.01, min_lr=0.03)
    metric = [1 / (1 + min(step, 6)) + 0.001 * (step % 3) for step in range(30)]
    rates = []
    for value in metric:
        plateau.step(value)
        rates.append(optimizer.param_groups[0]["lr"])
    result["plateau"], result["plateau.metric"] = (torch.tensor(x, dtype=torch.float64) for x in (rates, metric))
    return result


class Model(torch.nn.Module):
    """Layers whose whole-batch mean is the mean over equal parts; control flow, a buffer and a frozen parameter for the script."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.fc2 = torch.nn.Linear(16, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        for _ in range(2):
            x = x * self.scale
        return self.fc2(torch.tanh(self.norm(self.fc1(x))))


def script(folder):
    # A script names the files it comes from: this one without the folders of the user.
    Model.forward.__code__ = Model.forward.__code__.replace(co_filename=os.path.basename(__file__))
    model = Model()
    with torch.no_grad():
        for i, value in enumerate(model.parameters()):
            if value.requires_grad:
                value.copy_(numbers(value.shape, i) * 0.4)
    torch.jit.script(model).save(folder + "/python_script.pt")
    model = torch.jit.load(folder + "/python_script.pt")
    model.train()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    data, target, losses = numbers((8, 12, 8), 1), numbers((8, 12, 4), 2), []
    for x, y in zip(data, target):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = {"data": data, "target": target, "losses": torch.tensor(losses, dtype=torch.float64)}
    run.update({"trained." + name: value.detach() for name, value in model.state_dict().items()})
    torch.save(run, folder + "/python_script_run.pt")


def write(folder):
    for protocol in (2, 3, 4, 5):
        torch.save(state(), f"{folder}/python_state_{protocol}.pt", pickle_protocol=protocol)
    torch.save(optimizers(), folder + "/python_optim.pt")
    torch.save(schedules(), folder + "/python_schedules.pt")
    script(folder)


def load_safetensors(path):
    """By the package if it is there; otherwise by the description of the format."""
    try:
        import safetensors.torch
        return safetensors.torch.load_file(path)
    except ImportError:
        pass
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
             "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(length)), bytearray(file.read())
    assert header.pop("__metadata__", {}).get("format") == "pt"
    result, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, after = entry["data_offsets"]
        assert begin == end, f"{name} begins at {begin}, what is before it ends at {end}"
        end, dtype = after, kinds[entry["dtype"]]
        values = torch.frombuffer(data, dtype=dtype, offset=begin, count=math.prod(entry["shape"])) if after > begin else torch.zeros(0, dtype=dtype)
        assert values.numel() * values.element_size() == after - begin
        result[name] = values.reshape(entry["shape"])
    assert end == len(data)
    return result


def read(folder):
    expected = state()
    one = load_safetensors(folder + "/state.safetensors")
    with open(folder + "/shards/model.safetensors.index.json") as file:
        places = json.load(file)["weight_map"]
    assert len(set(places.values())) > 1, places
    several = {}
    for part in set(places.values()):
        for name, value in load_safetensors(f"{folder}/shards/{part}").items():
            assert places[name] == part
            several[name] = value
    assert "head.weight" not in one, "tied to embed.weight"
    for name, value in expected.items():
        if name == "head.weight":
            continue
        for found in (one[name], several[name]):
            assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value), name
    answer = {}
    for name, make in OPTIMIZERS.items():
        dict = load_safetensors(f"{folder}/{name}.safetensors")
        values = [dict[f"parameter.{i}"].clone().requires_grad_() for i in range(2)]
        optimizer = make(values)
        saved = optimizer.state_dict()
        for key, value in dict.items():
            words = key.split(".")
            if words[0] == "state":
                saved["state"].setdefault(int(words[1]), {})[words[2]] = value.clone()
            elif words[0] == "param_groups":
                assert words[2] in saved["param_groups"][int(words[1])], key
                saved["param_groups"][int(words[1])][words[2]] = value.tolist()
        optimizer.load_state_dict(saved)
        assert flat(optimizer.state_dict()).keys() == {key for key in flat(saved)}
        train(optimizer, values, range(STEPS // 2, STEPS))
        answer.update({f"{name}.{i}": value.detach() for i, value in enumerate(values)})
    torch.save(answer, folder + "/answer.pt")


if __name__ == "__main__":
    what, where = {"write": write, "read": read}[sys.argv[1]], os.path.abspath(sys.argv[2])
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    what(where)
