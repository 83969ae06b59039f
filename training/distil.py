"""Distil a bundled model to four steps without guidance: a LoRA, `pytorch_lora_weights.safetensors`.

    python training/distil.py models/tokenmerge_models/tiny-flux --data DATA --out build/tiny-flux-4step --minutes 12

The teacher is the plain model with 28 steps and guidance. One step of the student lands where seven steps of the
teacher would. Everything starts from noise, so no photographs are needed: DATA has the flower names and other prompts.
For half of the pictures, the next step starts where the student itself landed, so that it learns to mend its errors.

`samples.jpg` compares both. To try it on a CPU, add `--sizes 64 --batch 2 --minutes 0.3 --captions 1 --warmup 2`.
"""

from __future__ import annotations

import argparse
import random
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captions import read_sentences, without_flowers
from conditions import make_captions
from data import read_names
from diffusers import DiffusionPipeline, FluxPipeline
from flux import image_ids, time_shift
from loop import configure_backends
from optim import Average, Clock
from peft import LoraConfig
from samples import NAMES, generate, load_pipeline, sheet
from torch import Tensor, nn

TEACHER_STEPS, STEPS = 28, 4
STRIDE = TEACHER_STEPS // STEPS
TEXT_LENGTH = 32
OWN_SHARE = 0.5


class Sampling(ABC):
    """Steps along a pipeline's own schedule at one size. text: encoded captions; the last row is for no caption."""

    def __init__(self, pipe: DiffusionPipeline, size: int, text: tuple[Tensor, ...], guidance: float) -> None:
        self.pipe, self.side, self.text, self.guidance = pipe, size // 4, text, guidance
        self.device = pipe._execution_device
        self.set_timesteps()
        self.sigmas: Tensor = pipe.scheduler.sigmas.to(self.device, torch.float64)
        self.times: Tensor = pipe.scheduler.timesteps.to(self.device)

    @abstractmethod
    def set_timesteps(self) -> None:
        """Set the teacher's timesteps. Every seventh is also the student's."""

    @abstractmethod
    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """The noise from which pictures start."""

    @abstractmethod
    def output(self, state: Tensor, step: int, captions: Tensor) -> Tensor:
        """The model's output at a step of the teacher."""

    @abstractmethod
    def shares(self, step: int, later: int) -> tuple[Tensor, Tensor]:
        """The factors of the state and of the output in an Euler step."""

    def land(self, state: Tensor, output: Tensor, step: int, later: int) -> Tensor:
        kept, added = self.shares(step, later)
        return (kept * state.double() + added * output.double()).float()

    def wanted(self, state: Tensor, landing: Tensor, step: int, later: int) -> Tensor:
        """The output whose Euler step leads to a landing."""
        kept, added = self.shares(step, later)
        return ((landing.double() - kept * state.double()) / added).float()

    @torch.no_grad()
    def guided(self, state: Tensor, first: int, last: int, captions: Tensor) -> Tensor:
        """Where the teacher's guided steps from `first` to `last` lead."""
        none = torch.full_like(captions, len(self.text[0]) - 1)
        for step in range(first, last):
            both = self.output(torch.cat([state, state]), step, torch.cat([none, captions])).float()
            empty, captioned = both.chunk(2)
            state = self.land(state, empty + self.guidance * (captioned - empty), step, step + 1)
        return state


class FluxSampling(Sampling):
    """Tokens of a flow: the output is noise - picture, and the state moves along it."""

    def set_timesteps(self) -> None:
        tokens = (self.side // 2) ** 2
        sigmas = np.linspace(1.0, 1 / TEACHER_STEPS, TEACHER_STEPS)
        self.pipe.scheduler.set_timesteps(sigmas=sigmas, mu=time_shift(tokens), device=self.device)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        transformer = self.pipe.transformer
        shape = count, (self.side // 2) ** 2, transformer.config.in_channels
        return torch.randn(shape, generator=generator, device=self.device)

    def output(self, state: Tensor, step: int, captions: Tensor) -> Tensor:
        states, pooled = self.text
        return self.pipe.transformer(
            hidden_states=state,
            timestep=(self.times[step] / 1000).expand(len(state)),
            pooled_projections=pooled[captions],
            encoder_hidden_states=states[captions],
            txt_ids=torch.zeros(states.shape[1], 3, device=self.device),
            img_ids=image_ids(self.side // 2, self.side // 2, self.device),
            return_dict=False,
        )[0]

    def shares(self, step: int, later: int) -> tuple[Tensor, Tensor]:
        return torch.ones_like(self.sigmas[0]), self.sigmas[later] - self.sigmas[step]


class SdxlSampling(Sampling):
    """Latents with noise of deviation sigma: the output is v."""

    def set_timesteps(self) -> None:
        self.pipe.scheduler.set_timesteps(TEACHER_STEPS, device=self.device)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        shape = count, self.pipe.unet.config.in_channels, self.side, self.side
        return torch.randn(shape, generator=generator, device=self.device) * self.pipe.scheduler.init_noise_sigma

    def output(self, state: Tensor, step: int, captions: Tensor) -> Tensor:
        states, pooled = self.text
        size = 4.0 * self.side
        time_ids = torch.tensor([size, size, 0.0, 0.0, size, size], device=self.device).expand(len(state), 6)
        scaled = state / (self.sigmas[step].float() ** 2 + 1).sqrt()
        added = {"text_embeds": pooled[captions], "time_ids": time_ids}
        return self.pipe.unet(scaled, self.times[step], states[captions], added_cond_kwargs=added, return_dict=False)[0]

    def shares(self, step: int, later: int) -> tuple[Tensor, Tensor]:
        sigma, left = self.sigmas[step], self.sigmas[later] / self.sigmas[step]
        length = sigma**2 + 1
        return left + (1 - left) / length, -(1 - left) * sigma / length.sqrt()


def encode(pipe: DiffusionPipeline, captions: list[str]) -> tuple[Tensor, ...]:
    """Captions as the pipeline's denoiser sees them. The last row is what it sees without a caption."""
    parts = []
    with torch.inference_mode():
        for start in range(0, len(captions), 256):
            some = captions[start : start + 256]
            if isinstance(pipe, FluxPipeline):
                parts.append(pipe.encode_prompt(some, None, max_sequence_length=TEXT_LENGTH)[:2])
            else:
                states, none, pooled, none_pooled = pipe.encode_prompt(some)
                parts.append((states, pooled))
        if isinstance(pipe, FluxPipeline):
            parts.append(pipe.encode_prompt("", None, max_sequence_length=TEXT_LENGTH)[:2])
        else:
            parts.append((none[:1], none_pooled[:1]))
    # Cloned, because a backward pass refuses tensors made under inference mode.
    return tuple(torch.cat(part).clone() for part in zip(*parts, strict=True))


def add_lora(denoiser: nn.Module, rank: int, seed: int) -> nn.ParameterList:
    """Add a LoRA to every linear layer of the blocks; returns its weights, in fp32."""
    names = [name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear) and "block" in name]
    denoiser.requires_grad_(False)
    torch.manual_seed(seed)
    denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=names, init_lora_weights=True))
    weights = nn.ParameterList(each for each in denoiser.parameters() if each.requires_grad)
    for weight in weights:
        weight.data = weight.data.float()
    return weights


def teach(sampling: Sampling, denoiser: Any, captions: Tensor, generator: torch.Generator) -> float:
    """Add up the gradients of all four steps for one batch; returns the mean loss."""
    state, losses = sampling.noise(len(captions), generator), []
    for step in range(0, TEACHER_STEPS, STRIDE):
        later = step + STRIDE
        denoiser.disable_adapters()
        landing = sampling.guided(state, step, later, captions)
        denoiser.enable_adapters()
        output = sampling.output(state, step, captions).float()
        loss = (output - sampling.wanted(state, landing, step, later)).square().mean() / STEPS
        loss.backward()
        losses.append(loss.detach())
        own = torch.rand(len(captions), generator=generator, device=state.device) < OWN_SHARE
        own = own.view(-1, *(1 for _ in state.shape[1:]))
        state = torch.where(own, sampling.land(state, output.detach(), step, later), landing)
    return float(torch.stack(losses).sum())


def save_samples(pipe: DiffusionPipeline, denoiser: Any, path: Path, sizes: list[int], guidance: float) -> None:
    """The teacher's pictures above the student's."""
    names = list(NAMES[:4])
    prompts = [f"a photo of a {name}" for name in names]
    for size in sizes:
        denoiser.disable_adapters()
        taught = [*generate(pipe, prompts, size, TEACHER_STEPS, guidance, text_length=TEXT_LENGTH)]
        denoiser.enable_adapters()
        drawn = [*generate(pipe, prompts, size, STEPS, 1.0, text_length=TEXT_LENGTH)]
        captions = [f"{name}, {steps} steps" for steps in (TEACHER_STEPS, STEPS) for name in names]
        sheet(taught + drawn, captions).save(path.with_stem(f"{path.stem}-{size}"), quality=85)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the teacher")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of flower_names.json")
    parser.add_argument("--prompts", type=Path, help="folder of the prompt files (default: prompts in --data)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--batch", type=int, default=128, help="pictures of 256 px; fewer of larger ones")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--guidance", type=float, default=2.5, help="of the teacher")
    parser.add_argument("--captions", type=int, default=48, help="captions per flower")
    parser.add_argument("--compile", action="store_true", help="torch.compile the repeated blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    configure_backends()
    pipe = load_pipeline(args.model, args.device, torch.float32)
    denoiser: Any = pipe.transformer if isinstance(pipe, FluxPipeline) else pipe.unet
    names = read_names(args.data)
    sentences = without_flowers(read_sentences(args.prompts or args.data / "prompts"), names)
    texts = make_captions(names, sentences, args.captions)
    text = encode(pipe, texts)
    kind = FluxSampling if isinstance(pipe, FluxPipeline) else SdxlSampling
    samplings = {size: kind(pipe, size, text, args.guidance) for size in args.sizes}
    weights = add_lora(denoiser, args.rank, args.seed)
    if args.compile:
        denoiser.compile_repeated_blocks(dynamic=False)
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.0)
    average, clock = Average(weights, args.ema), Clock(args.minutes, args.warmup, 0.4, args.minutes)
    device = torch.device(args.device)
    generator, dice = torch.Generator(device).manual_seed(args.seed), random.Random(args.seed)
    recent, pictures, since = [], 0, time.monotonic()
    while clock.running():
        size = dice.choice(args.sizes)
        count = max(1, args.batch * 256**2 // max(size, 256) ** 2)
        captions = torch.randint(len(texts), (count,), generator=generator, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            recent.append(teach(samplings[size], denoiser, captions, generator))
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = args.lr * clock.factor()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        pictures += count
        if clock.steps % args.log_every == 0:
            speed = pictures / (time.monotonic() - since)
            print(f"step {clock.steps}: loss {sum(recent) / len(recent):.4f}, {speed:.1f} pictures/s", flush=True)
            recent, pictures, since = [], 0, time.monotonic()
    average.swap()
    args.out.mkdir(parents=True, exist_ok=True)
    save_samples(pipe, denoiser, args.out / "samples.jpg", args.sizes, args.guidance)
    from peft.utils import get_peft_model_state_dict

    part = "transformer" if isinstance(pipe, FluxPipeline) else "unet"
    lora = {name: weight.half() for name, weight in get_peft_model_state_dict(denoiser).items()}
    pipe.save_lora_weights(args.out, **{f"{part}_lora_layers": lora})
    print(f"{sum(weight.nbytes for weight in lora.values()) / 1e6:.1f} MB of weights", flush=True)


if __name__ == "__main__":
    main()
