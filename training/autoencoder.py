"""Train the autoencoder that both pipelines share: `AutoencoderKL`, three levels, 4x downsampling.

    python training/autoencoder.py --data DATA --lpips build/lpips_vgg.safetensors --out build/vae --minutes 5

Six latent channels: on these photographs the best linear code of 4x4 pixels reaches 25.8 dB with four
channels, 29.1 with six and 31.0 with eight, and a small network gains about 2 dB on it. Four would leave no
room above 27 dB, and every further channel is detail that the denoisers must learn to draw.

After training, the latents' mean and deviation per channel are folded into the last convolution of the
encoder and the first of the decoder: latents then have mean 0 and deviation 1, with `scaling_factor` 1 and
`shift_factor` 0 (Flux adds a shift before decoding, SDXL does not, so only zero serves both).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from data import FULL_SIZE, Crop, Photographs, cut, load_photographs, random_crop
from diffusers import AutoencoderKL
from optim import Average, Clock, Optimizers, load_weights, save_weights
from perceptual import load as load_distance
from torch import Tensor

from tokenmerge.tools.quality.perceptual import PerceptualDistance

CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 6,
    "block_out_channels": (32, 64, 80),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 256,
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
    "force_upcast": False,
}
KL_WEIGHT = 3e-3
PERCEPTUAL_WEIGHT = 0.25
HALVED_SHARE = 0.2
SIZE = 256


def make_autoencoder(files: list[Path] | None = None) -> AutoencoderKL:
    vae = AutoencoderKL(**CONFIG)
    if files:
        vae.load_state_dict(load_weights(files))
    return vae


def draw_batch(photographs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Half the batches are whole photographs at 256 px, half are 256 px windows at full resolution.

    photographs: uint8 [n, 3, 512, 512]; returns [count, 3, 256, 256] in -1..1.
    """
    chosen = torch.randint(len(photographs), (count,), generator=generator).to(photographs.device)
    mirror, whole, top, left = torch.rand(4, generator=generator).tolist()
    room = FULL_SIZE - SIZE
    crop = Crop(mirror=mirror < 0.5)
    if whole < 0.5:
        crop = Crop(SIZE, round(room * top), round(room * left), mirror < 0.5)
    return cut(photographs[chosen], crop, SIZE)


def loss_terms(
    vae: AutoencoderKL, images: Tensor, distance: PerceptualDistance | None, halve: bool
) -> dict[str, Tensor]:
    """Absolute error, perceptual distance and divergence of the latents from unit noise, each a mean.

    With `halve` the latents are averaged 2x2 before decoding and the image is halved too: what is true of an
    image then stays true of its latents, which makes them easier to generate at two sizes.
    """
    posterior = vae.encode(images).latent_dist
    latents = posterior.sample()
    if halve:
        latents = F.avg_pool2d(latents, 2)
        images = F.interpolate(images, scale_factor=0.5, mode="bicubic", antialias=True).clamp(-1, 1)
    decoded = vae.decode(latents).sample
    terms = {
        "absolute": (decoded - images).abs().mean(),
        "divergence": posterior.kl().mean() / posterior.mean[0].numel(),
    }
    if distance is not None:
        terms["perceptual"] = distance(decoded, images).mean()
    return terms


@torch.inference_mode()
def psnr(vae: AutoencoderKL, photographs: Tensor, size: int, batch: int = 16) -> float:
    """Mean over photographs of the PSNR in dB of 8-bit reconstructions at `size` pixels."""
    device = next(vae.parameters()).device
    values = []
    for part in photographs.split(batch):
        images = cut(part.to(device), Crop(), size)
        decoded = vae.decode(vae.encode(images).latent_dist.mode()).sample.clamp(-1, 1)
        difference = ((decoded + 1) * 127.5).round() - ((images + 1) * 127.5).round()
        values += (20 * math.log10(255) - 10 * difference.square().mean(dim=(1, 2, 3)).log10()).tolist()
    return sum(values) / len(values)


@torch.inference_mode()
def latent_statistics(vae: AutoencoderKL, photographs: Tensor, batch: int = 16) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over photographs at both sizes."""
    device = next(vae.parameters()).device
    values = []
    for part in photographs.split(batch):
        for size in (SIZE, FULL_SIZE):
            latents = vae.encode(cut(part.to(device), Crop(), size)).latent_dist.mode()
            # Equal numbers of values from either size.
            values.append(latents[:, :, :: size // SIZE, :: size // SIZE].transpose(0, 1).flatten(1))
    merged = torch.cat(values, dim=1).double()
    return merged.mean(1).float(), merged.std(1).float()


@torch.no_grad()
def fold_statistics(vae: AutoencoderKL, mean: Tensor, deviation: Tensor) -> None:
    """Make the encoder give (latent - mean) / deviation and the decoder take it; reconstructions stay.

    The decoder's first convolution pads with zeros, which now stand for the mean: at the border the decoded
    image changes a little. Its log-variance outputs move by -2 log(deviation).
    """
    channels = len(mean)
    encoder_out, decoder_in = vae.encoder.conv_out, vae.decoder.conv_in
    encoder_out.weight[:channels] /= deviation.view(-1, 1, 1, 1)
    encoder_out.bias[:channels] = (encoder_out.bias[:channels] - mean) / deviation
    encoder_out.bias[channels:] -= 2 * deviation.log()
    decoder_in.bias += (decoder_in.weight.sum(dim=(2, 3)) * mean).sum(dim=1)
    decoder_in.weight *= deviation.view(1, -1, 1, 1)


@dataclass(frozen=True)
class Views:
    """Latents of several views of every photograph, for training a denoiser.

    latents: fp16 [views, n, 6, size / 4, size / 4]; view 0 is the whole photograph, view 1 its mirror image,
    the others are random crops, one for each batch of photographs. time_ids: [views, n, 6] as SDXL wants
    them; labels: [n].
    """

    latents: Tensor
    time_ids: Tensor
    labels: Tensor

    def draw(self, count: int, whole_share: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents [count, 6, h, w], labels [count], time_ids [count, 6]; `whole_share` uncropped."""
        device = self.latents.device
        views, photographs = self.latents.shape[:2]
        chosen = torch.randint(photographs, (count,), generator=generator, device=device)
        whole = torch.rand(count, generator=generator, device=device) < whole_share
        view = torch.randint(2, (count,), generator=generator, device=device)
        if views > 2:
            cropped = torch.randint(2, views, (count,), generator=generator, device=device)
            view = torch.where(whole, view, cropped)
        return self.latents[view, chosen].float(), self.labels[chosen], self.time_ids[view, chosen]


@torch.inference_mode()
def encode_views(
    vae: AutoencoderKL, photographs: Photographs, size: int, views: int, device: torch.device, batch: int = 32
) -> Views:
    """Encode `views` views of every photograph at `size` pixels (mean of the posterior, no sampling)."""
    generator = torch.Generator().manual_seed(size)
    count, side = len(photographs.labels), size // 4
    latents = torch.empty(views, count, CONFIG["latent_channels"], side, side, dtype=torch.float16, device=device)
    time_ids = torch.empty(views, count, 6, device=device)
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        images = photographs.images[part].to(device)
        for view in range(views):
            crop = Crop(mirror=view == 1) if view < 2 else random_crop(generator, smallest=0.8)
            latents[view, part] = vae.encode(cut(images, crop, size)).latent_dist.mode().half()
            time_ids[view, part] = torch.tensor(crop.time_ids(size), device=device, dtype=torch.float)
    return Views(latents, time_ids, photographs.labels.to(device))


def train(args: argparse.Namespace, vae: AutoencoderKL, photographs: Tensor, device: torch.device) -> None:
    """Train until the clock runs out; leaves the averaged weights in `vae`."""
    generator = torch.Generator().manual_seed(args.seed)
    distance = load_distance(args.lpips).to(device) if args.lpips else None
    vae.to(device, memory_format=torch.channels_last)
    optimizers = Optimizers(vae, args.lr, args.lr, ("encoder.conv_in", "decoder.conv_out"), decay=0.0)
    average = Average(vae, decay=0.998)
    clock = Clock(args.minutes, warmup_steps=100, decay_share=0.5, save_minutes=args.save_minutes)
    while clock.running():
        images = draw_batch(photographs, args.batch, generator).contiguous(memory_format=torch.channels_last)
        halve = torch.rand((), generator=generator).item() < HALVED_SHARE
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            terms = loss_terms(vae, images, distance, halve)
        loss = terms["absolute"] + KL_WEIGHT * terms["divergence"]
        if distance is not None:
            loss = loss + PERCEPTUAL_WEIGHT * terms["perceptual"]
        loss.backward()
        optimizers.step(clock.factor())
        average.update()
        if clock.steps % args.log_every == 0:
            shown = ", ".join(f"{name} {value.item():.4f}" for name, value in terms.items())
            print(f"vae step {clock.steps}, {clock.elapsed:.0f} s: {shown}", flush=True)
        if clock.save_is_due():
            save_weights(average.state(), args.out, "vae_unfolded")
    average.swap()
    print(f"vae: {clock.steps} steps of {args.batch} in {clock.elapsed:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the shards")
    parser.add_argument("--lpips", type=Path, help="weights from perceptual.py; without them no perceptual loss")
    parser.add_argument("--out", type=Path, default=Path("build/vae"))
    parser.add_argument("--init", type=Path, nargs="+", help="weights to continue from")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--limit", type=int, help="photographs per shard, for a trial")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)

    everything = load_photographs(args.data, args.workers, args.limit)
    known, held_back = everything.part(False), everything.part(True).images
    print(f"{len(known.labels)} photographs to train on, {len(held_back)} held back", flush=True)
    vae = make_autoencoder(args.init)
    train(args, vae, known.images.to(device), device)
    mean, deviation = latent_statistics(vae, known.images[:512])
    print(f"latent mean {mean.tolist()}, deviation {deviation.tolist()}")
    before = psnr(vae, held_back[:64], SIZE)
    fold_statistics(vae, mean, deviation)
    report = {f"psnr_{size}": round(psnr(vae, held_back, size), 3) for size in (SIZE, FULL_SIZE)}
    print(f"held-back photographs: {report} dB; folding: {psnr(vae, held_back[:64], SIZE) - before:.3f} dB")
    save_weights(vae.state_dict(), args.out, "vae")
    (args.out / "vae.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
