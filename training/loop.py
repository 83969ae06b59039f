"""The training loop and the command-line options that the two denoisers share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from autoencoder import Views, encode_views, make_autoencoder
from captions import read_sentences, without_flowers
from conditions import make_captions
from data import load_photographs, read_names
from optim import Average, Clock, Optimizers, load_weights, save_weights
from torch import Tensor, nn


def option_parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """The options of both denoisers' training."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the shards and flower_names.json")
    parser.add_argument("--prompts", type=Path, help="folder of the prompt files (default: prompts in --data)")
    parser.add_argument("--vae", type=Path, nargs="+", required=True, help="weights from autoencoder.py")
    parser.add_argument("--text", type=Path, default=Path("build/text"), help="folder from text.py")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--init", type=Path, nargs="+", help="weights to continue from")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--warmup", type=int, default=300, help="steps of rising learning rate")
    parser.add_argument("--decay-share", type=float, default=0.5, help="last part of the time, with falling rate")
    parser.add_argument("--lr", type=float, default=2e-3, help="of Muon; AdamW has half of it")
    parser.add_argument("--ema", type=float, default=0.9993)
    parser.add_argument("--batch", type=int, default=256, help="images of 256 px; a quarter as many of 512 px")
    parser.add_argument("--large-share", type=float, default=0.0, help="share of steps at 512 px")
    parser.add_argument("--large-after", type=float, default=0.0, help="share of the time that is 256 px alone")
    parser.add_argument("--views", type=int, default=8, help="views per photograph: two whole ones, the rest crops")
    parser.add_argument("--whole-share", type=float, default=0.6, help="share of uncropped photographs")
    parser.add_argument("--captions", type=int, default=48, help="captions per flower")
    parser.add_argument("--compile", action="store_true", help="torch.compile the repeated blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--limit", type=int, help="photographs per shard, for a trial")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


@dataclass(frozen=True)
class Material:
    """Latents by image size, for training and held back, and the captions."""

    known: dict[int, Views]
    held_back: dict[int, Views]
    captions: list[str]
    classes: int


def prepare(args: argparse.Namespace, name: str, model: nn.Module) -> Material:
    """Load the weights to continue from, decode the photographs, encode all views, write the captions."""
    if args.init:
        model.load_state_dict(load_weights(args.init))
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    device = torch.device(args.device)
    names = read_names(args.data)
    companions = without_flowers(read_sentences(args.prompts or args.data / "prompts"), names)
    everything = load_photographs(args.data, args.workers, args.limit)
    vae = make_autoencoder(args.vae).to(device).eval()
    sizes = (256, 512) if args.large_share > 0 else (256,)
    known = {size: encode_views(vae, everything.part(False), size, args.views, device) for size in sizes}
    held_back = {size: encode_views(vae, everything.part(True), size, 2, device) for size in sizes}
    for size, views in known.items():
        values = views.latents[0].float()
        print(f"{size} px: latents {[*views.latents.shape]}, mean {values.mean():.3f}, std {values.std():.3f}")
    return Material(known, held_back, make_captions(names, companions, args.captions), len(names))


def configure_backends() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # Its backward pass crashes in torch 2.11 for about a thousand tokens with heads of 64.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # One compiled version for each text length and image size, with and without gradients.
    torch._dynamo.config.recompile_limit = 64


def fit(
    args: argparse.Namespace,
    name: str,
    model: nn.Module,
    adamw_names: tuple[str, ...],
    loss: Callable[[int, torch.Generator], Tensor],
    held_back_loss: Callable[[], float],
) -> None:
    """Train `model` until the clock runs out and write its averaged weights as `name.K.safetensors`.

    loss(size, generator) draws a batch at `size` pixels and returns its mean loss; held_back_loss() judges
    the averaged weights, always on the same latents, noise and times.
    """
    device = torch.device(args.device)
    generator = torch.Generator(device).manual_seed(args.seed)
    dice = torch.Generator().manual_seed(args.seed)
    optimizers = Optimizers(model, args.lr, args.lr / 2, adamw_names, decay=0.1)
    average = Average(model, args.ema)
    clock = Clock(args.minutes, args.warmup, args.decay_share, args.save_minutes)
    history: list[dict[str, float]] = []

    def save() -> None:
        average.swap()
        # Uncompiled: a batch of another size without gradients would be compiled for one short use.
        with torch.compiler.set_stance("force_eager"):
            judged = held_back_loss()
        average.swap()
        history.append({"minutes": clock.elapsed / 60, "steps": clock.steps, "held_back_loss": judged})
        print(f"{name} saved: {history[-1]}", flush=True)
        save_weights(average.state(), args.out, name)
        (args.out / f"{name}.json").write_text(json.dumps(history))

    recent = torch.zeros((), device=device)
    images, since = 0, 0.0
    while clock.running():
        mixed = clock.elapsed >= args.large_after * 60 * args.minutes
        size = 512 if mixed and torch.rand((), generator=dice).item() < args.large_share else 256
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(size, generator)
        value.backward()
        optimizers.step(clock.factor())
        average.update()
        recent += value.detach()
        images += batch_size(args, size)
        if clock.steps % args.log_every == 0:
            shown, speed = recent.item() / args.log_every, images / (clock.elapsed - since)
            figures = f"loss {shown:.4f}, {speed:.0f} images/s"
            print(f"{name} step {clock.steps}, {clock.elapsed:.0f} s: {figures}", flush=True)
            recent.zero_()
            images, since = 0, clock.elapsed
        if clock.save_is_due() and clock.running():
            save()
    save()


def batch_size(args: argparse.Namespace, size: int) -> int:
    return args.batch if size == 256 else max(1, args.batch // 4)
