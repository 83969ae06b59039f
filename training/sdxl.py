"""Train the denoiser of `tiny-sdxl`: a `UNet2DConditionModel` of 7.5 M parameters with SDXL's structure.

    python training/sdxl.py --data DATA --vae build/vae/vae.0.safetensors --out build/sdxl --minutes 15
    python training/sdxl.py ... --init build/sdxl/sdxl.*.safetensors --large-share 0.4 --minutes 15

Three levels, the first without attention; at 256 px the finer attention level has 32 x 32 = 1024 tokens.

The model predicts v = sqrt(a) noise - sqrt(1 - a) x_0 under a schedule whose last step is pure noise. SDXL's
own schedule never ends in pure noise, and in latents as large as these (64 x 64 and more) the average colour
shows through all of it: a model would learn to read it there and find nothing when it samples.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from autoencoder import CONFIG as VAE_CONFIG
from conditions import CaptionDraw, encode_clip
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel
from loop import Material, batch_size, configure_backends, fit, option_parser, prepare
from text import WIDTH as TEXT_WIDTH
from torch import Tensor, nn

TIME_ID_WIDTH = 32
CONFIG = {
    "sample_size": 128,
    "in_channels": VAE_CONFIG["latent_channels"],
    "out_channels": VAE_CONFIG["latent_channels"],
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (48, 96, 128),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 2, 2),
    "attention_head_dim": (3, 3, 4),  # diffusers' name for the number of heads, here of 32 channels
    "cross_attention_dim": 2 * TEXT_WIDTH,
    "use_linear_projection": True,
    "norm_num_groups": 16,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": TIME_ID_WIDTH,
    "projection_class_embeddings_input_dim": 6 * TIME_ID_WIDTH + TEXT_WIDTH,
}
SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}


def make_unet() -> UNet2DConditionModel:
    """A new UNet in which every residual branch and the output start at zero."""
    model = UNet2DConditionModel(**CONFIG)
    for name, module in model.named_modules():
        if name.endswith((".conv2", ".proj_out", ".to_out.0", ".ff.net.2")) or name == "conv_out":
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


class Diffusion:
    """The v-prediction loss over precomputed latents and caption embeddings."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, material: Material) -> None:
        self.args, self.model, self.material, self.device = args, model, material, torch.device(args.device)
        _, projected, states = encode_clip(args.text, material.captions, self.device)
        # Both text encoders of the pipeline are this one. The last row is the pipeline's "no prompt": zeros.
        doubled = torch.cat([states, states], dim=-1)
        self.states = torch.cat([doubled, torch.zeros_like(doubled[:1])])
        self.pooled = torch.cat([projected, torch.zeros_like(projected[:1])])
        self.draw_captions = CaptionDraw(args.captions, material.classes)
        self.signal = EulerDiscreteScheduler(**SCHEDULER).alphas_cumprod.to(self.device)

    def predict(self, noisy: Tensor, steps: Tensor, captions: Tensor, time_ids: Tensor) -> Tensor:
        added = {"text_embeds": self.pooled[captions], "time_ids": time_ids}
        states = self.states[captions]
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        return self.model(noisy, steps, states, added_cond_kwargs=added, return_dict=False)[0]

    def corrupt(self, latents: Tensor, noise: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy latents and the v to predict, both [b, c, h, w], at steps int64 [b] of 0..999."""
        share = self.signal[steps].view(-1, 1, 1, 1)
        clean, noisy = share.sqrt(), (1 - share).sqrt()
        return clean * latents + noisy * noise, clean * noise - noisy * latents

    def loss(self, size: int, generator: torch.Generator) -> Tensor:
        """Mean squared error of v for one random batch at `size` pixels."""
        count = batch_size(self.args, size)
        latents, labels, time_ids = self.material.known[size].draw(count, self.args.whole_share, generator)
        noise = torch.randn(latents.shape, generator=generator, device=self.device)
        steps = torch.randint(len(self.signal), (count,), generator=generator, device=self.device)
        noisy, wanted = self.corrupt(latents, noise, steps)
        captions = self.draw_captions(labels, generator)
        # Half of the dropped captions are the empty text (negative_prompt=""), half are zeros (none given).
        empty = captions == len(self.pooled) - 2
        captions = captions + (empty & (torch.rand(count, generator=generator, device=self.device) < 0.5))
        return F.mse_loss(self.predict(noisy, steps, captions, time_ids).float(), wanted)

    @torch.no_grad()
    def held_back_loss(self) -> float:
        """Mean loss at 256 px over held-back photographs and evenly spread steps, the same at every call."""
        views = self.material.held_back[256]
        generator = torch.Generator(self.device).manual_seed(1)
        values = []
        parts = [part[:256].split(64) for part in (views.latents[0], views.labels, views.time_ids[0])]
        for latents, labels, time_ids in zip(*parts, strict=True):
            noise = torch.randn(latents.shape, generator=generator, device=self.device)
            steps = (torch.arange(len(latents), device=self.device) + 0.5) / len(latents) * len(self.signal)
            noisy, wanted = self.corrupt(latents.float(), noise, steps.long())
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                predicted = self.predict(noisy, steps.long(), labels * self.args.captions, time_ids)
            values.append(F.mse_loss(predicted.float(), wanted).item())
        return sum(values) / len(values)


def main() -> None:
    args = option_parser(__doc__, out="build/sdxl").parse_args()
    torch.manual_seed(args.seed)
    configure_backends()
    model = make_unet()
    material = prepare(args, "sdxl", model)
    model.to(args.device, memory_format=torch.channels_last).train()
    diffusion = Diffusion(args, torch.compile(model, dynamic=False) if args.compile else model, material)
    outer = ("conv_in", "conv_out", "time_embedding", "add_embedding")
    fit(args, "sdxl", model, outer, diffusion.loss, diffusion.held_back_loss)


if __name__ == "__main__":
    main()
