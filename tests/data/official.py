"""Small files in the official layouts, and what is done with a data module in most tests."""

import numpy as np


def write_mnist(directory, train=30, test=8, label=None):
    """Image number n is n + 1 in the middle and n in its first pixel; its label is n % 10; ``label`` is the last's."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count, start in (("train", train, 0), ("t10k", test, train)):
        numbers = np.arange(start, start + count)
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 8:20, 8:20] = 1 + numbers[:, None, None]
        images[:, 0, 0] = numbers
        header = np.array([0x0803, count, 28, 28], ">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (numbers % 10).astype(np.uint8)
        if label is not None:
            labels[-1] = label
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([0x0801, count], ">i4").tobytes() + labels.tobytes())
    return raw


def prepared(datamodule):
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule
