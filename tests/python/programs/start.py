"""What the programs here share: how a launcher's rank, or mp.spawn's, joins the group; digits that are drawn instead of downloaded; a network
for them."""

import os
import socket

import torch
import torch.multiprocessing as mp

import maniple_torch  # noqa: F401  (registers the backend)

# Of each digit, lit.
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
PLACES = {"a": (0, slice(1, 4)), "b": (slice(1, 4), 4), "c": (slice(5, 8), 4), "d": (8, slice(1, 4)), "e": (slice(5, 8), 0),
          "f": (slice(1, 4), 0), "g": (4, slice(1, 4))}


def drawn_digits(count, seed=0):
    """Images of 12 x 8 with a digit of seven segments at some place, and noise; and which digit it is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = 0.2 * torch.rand(count, 1, 12, 8, generator=generator)
    for image, label in zip(images, labels.tolist()):
        down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
        for segment in SEGMENTS[label]:
            image[0, down:down + 9, right:right + 5][PLACES[segment]] += 0.8
    return images, labels


def network():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 12 * 8, 10))


def accuracy(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_launched():
    """By torchrun or maniple run, which set the variables of env://."""
    return "RANK" in os.environ


def spawn(body, size, *arguments):
    """body(rank, size, URL, ...) in processes of mp.spawn."""
    mp.spawn(body, args=(size, f"tcp://127.0.0.1:{free_port()}", *arguments), nprocs=size)


def start(body, size=2):
    if is_launched():
        body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    else:
        spawn(body, size)
