"""Labels of images and volumes: one block in a loop against a stack of blocks, at equal FLOPs and equal parameter memory.

    python pipelines/classification.py digits                             8 x 8 digits of scikit-learn, minutes on one core
    python pipelines/classification.py acdc --data path/to/ACDC           the five groups, from ED and ES volumes
    python pipelines/classification.py cifar100 --data path/to/folder     folder/train/CLASS/*.png, folder/test/CLASS/*.png

Digits and ACDC are split at random, stratified, a fifth to test (ACDC: by patient); the same split for all systems and seeds.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
import torch.nn.functional as F
from matched_budget import loop_parameters, matched_width
from torch import Tensor

from rdvit.config import ModelConfig
from rdvit.data.datalist import load_data, patients
from rdvit.data.transforms import normalize, resize_in_plane
from rdvit.data.volume import read_image, to_canonical
from rdvit.errors import DataError
from rdvit.models.build import count_parameters, parameter_groups
from rdvit.models.classifier import Classifier

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # training images and labels, test images and labels

# What a task is: the network, the length of the training, its learning rate, the shift that augments (pixels), mirroring.
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"model": {"patch_size": (2, 2), "embed_dim": 48}, "epochs": 60, "rate": 3e-3, "shift": 1, "flip": False},
    "acdc": {"model": {"patch_size": (8, 8, 2), "embed_dim": 96}, "epochs": 60, "rate": 1e-3, "shift": 6, "flip": False},
    "cifar100": {
        "model": {"patch_size": (4, 4), "embed_dim": 192, "num_heads": 6},
        "epochs": 100,
        "rate": 1e-3,
        "shift": 4,
        "flip": True,
    },
}


def digits() -> Data:
    """scikit-learn's 1797 digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    images_NXY, labels_N = load_digits(return_X_y=True)
    return split_at_random(torch.tensor(images_NXY / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels_N))


def acdc(folder: Path) -> Data:
    """ED and ES as two channels of a volume of 64 x 64 x 8, 168 mm wide, around the heart; the pathology group."""
    data = load_data(folder)
    groups = sorted({case.group for case in data.cases if case.group})
    images, labels = [], []
    for patient in patients(data.cases):
        own = sorted((case for case in data.cases if case.patient == patient and case.group), key=lambda case: case.phase or "")
        if [case.phase for case in own] != ["ED", "ES"]:
            raise DataError(f"patient {patient}: expected an ED and an ES image with a group", file=folder)
        volumes = [to_canonical(read_image(case.image))[0] for case in own]
        centre = study.heart_centre([volume.array for volume in volumes], volumes[0].spacing)
        half = [round(study.CROP_MM / 2 / s) for s in volumes[0].spacing[:2]]
        index = [
            np.clip(np.arange(-h, h) + round(c), 0, n - 1)
            for h, c, n in zip(half, centre, volumes[0].array.shape, strict=False)
        ]
        both = torch.stack([normalize(torch.from_numpy(v.array[np.ix_(*index)]), (0.5, 99.5)) for v in volumes])
        slices = F.interpolate(resize_in_plane(both, (64, 64)).flatten(1, 2), 8, mode="linear", align_corners=True)
        images.append(slices.view(2, 64, 64, 8))
        labels.append(groups.index(own[0].group or ""))
    return split_at_random(torch.stack(images), torch.tensor(labels))


def image_folder(folder: Path) -> Data:
    """``train`` and ``test`` with one folder of images per class, all of one size, in colour."""
    from PIL import Image

    parts: list[Tensor] = []
    names = sorted(path.name for path in folder.glob("train/*") if path.is_dir())
    for part in ("train", "test"):
        files = [(path, i) for i, name in enumerate(names) for path in sorted((folder / part / name).glob("*.*"))]
        if not files:
            raise DataError("expected train/CLASS/*.png and test/CLASS/*.png", file=folder)
        pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
        parts += [torch.from_numpy(pixels).movedim(-1, 1).float() / 127.5 - 1, torch.tensor([i for _, i in files])]
    return parts[0], parts[1], parts[2], parts[3]


def split_at_random(images: Tensor, labels: Tensor) -> Data:
    """A fifth of each class to test, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    test = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[::5] for c in range(int(labels.max()) + 1)])
    train = np.setdiff1d(np.arange(len(labels)), test)
    return images[train], labels[train], images[test], labels[test]


def systems(model: dict[str, Any], data: Data) -> dict[str, ModelConfig]:
    """The stack, and the loop at its FLOPs and at its memory."""
    dims = data[0].ndim - 2
    base = {"spatial_dims": dims, "in_channels": data[0].shape[1], "out_channels": int(data[1].max()) + 1, "num_heads": 3}
    base |= {"stem": "patch", "skips": "none", "position": "sincos", "loops": 6, "injection": "none", "loop_embedding": False}
    base |= {"lora_rank": 0, "halting": "none"} | model
    stack = ModelConfig(**base | {"preset": "vit", "shared_block": False})
    loop = ModelConfig(**base | {"preset": "bvit"})
    wide = matched_width(loop, loop_parameters(stack))
    equal_memory = ModelConfig.model_validate(loop.model_dump() | {"embed_dim": wide})
    return {"ViT": stack, "bViT, equal FLOPs": loop, "bViT, equal memory": equal_memory}


def augmented(images: Tensor, shift: int, flip: bool) -> Tensor:
    """A batch moved by up to ``shift`` pixels in the plane, the border repeated, every second one mirrored if ``flip``."""
    x, y = ((torch.arange(n) + torch.randint(-shift, shift + 1, ())).clamp(0, n - 1) for n in images.shape[2:4])
    moved = images[:, :, x][:, :, :, y]
    return moved.flip(3) if flip and torch.rand(()) < 0.5 else moved


def train(config: ModelConfig, data: Data, task: dict[str, Any], seed: int, device: str) -> float:
    """Accuracy on the test part after a training with AdamW and a cosine; nothing is chosen by it."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = data
    model = Classifier(config).to(device)
    groups: Any = parameter_groups(model, 0.05)
    optimizer = torch.optim.AdamW(groups, lr=task["rate"])
    size = min(64, len(images))
    total = task["epochs"] * (len(images) // size)
    for step in range(total):
        if step % (len(images) // size) == 0:
            order = torch.randperm(len(images))
        for group in optimizer.param_groups:
            group["lr"] = task["rate"] * min((step + 1) / (0.05 * total), 0.5 * (1 + math.cos(math.pi * step / total)))
        place = step % (len(images) // size) * size
        chosen = order[place : place + size]
        batch = augmented(images[chosen], task["shift"], task["flip"]).to(device)
        loss = F.cross_entropy(model(batch), labels[chosen].to(device), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        found = torch.cat([model(part.to(device)).argmax(1).cpu() for part in test_images.split(256)])
    return float((found == test_labels).float().mean())


def main(words: list[str] | None = None) -> None:
    """Train the systems of a task with all seeds and write table and paragraph, anew after each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--data", type=Path, help="folder of ACDC or of images")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder of the table (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each system (%(default)s)")
    parser.add_argument("--epochs", type=int, help="instead of the task's own")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps (%(default)s)")
    given = parser.parse_args(words)
    if given.task != "digits" and given.data is None:
        parser.error(f"{given.task} needs --data")
    task = TASKS[given.task] | ({} if given.epochs is None else {"epochs": given.epochs})
    data = digits() if given.task == "digits" else acdc(given.data) if given.task == "acdc" else image_folder(given.data)
    rows: list[dict[str, Any]] = []
    networks = systems(task["model"], data)
    for seed in range(given.seeds):
        for name, config in networks.items():
            start = time.perf_counter()
            accuracy = train(config, data, task, seed, given.device)
            row = {"task": given.task, "system": name, "seed": seed, "width": config.embed_dim}
            row |= {"parameters": count_parameters(Classifier(config)), "loop_parameters": loop_parameters(config)}
            rows.append(row | {"accuracy": accuracy, "seconds": time.perf_counter() - start})
            study.write_results(given.out / f"classification_{given.task}", rows, paragraph(rows, len(data[1]), len(data[3])))


def paragraph(rows: list[dict[str, Any]], train_count: int, test_count: int) -> str:
    """The table in words."""
    lines = [f"{rows[0]['task']}: {train_count} train, {test_count} test."]
    for name in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == name]
        values = [row["accuracy"] for row in own]
        lines.append(
            f"{name}: accuracy {np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f}, {len(own)} seeds), "
            f"{own[0]['loop_parameters'] / 1e6:.3f} M parameters in the loop, width {own[0]['width']}."
        )
    return " ".join(lines)


if __name__ == "__main__":
    study.run(main)
