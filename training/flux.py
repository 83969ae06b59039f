"""Train the denoiser of `tiny-flux`: a `FluxTransformer2DModel` of 9 M parameters, by rectified flow.

    python training/flux.py --data DATA --vae build/vae/vae.0.safetensors --out build/flux --minutes 15
    python training/flux.py ... --init build/flux/flux.*.safetensors --large-share 0.4 --minutes 15

The first command learns 256 px (1024 image tokens), the second goes on with 256 and 512 px (4096) mixed.

x_s = (1 - s) x_0 + s noise, and the model predicts noise - x_0 from x_s, s and the text. Times are drawn as
s = sigmoid(normal + mu) with mu = log 2 at 1024 tokens and log 4 at 4096; the saved scheduler shifts its
steps by the same mu, so sampling spends its steps where training spent its time.
"""

from __future__ import annotations

import argparse
import math
import random

import torch
import torch.nn.functional as F
from autoencoder import CONFIG as VAE_CONFIG
from conditions import CaptionDraw, encode_clip, encode_t5
from diffusers import FluxTransformer2DModel
from loop import Material, batch_size, configure_backends, fit, option_parser, prepare
from text import WIDTH as TEXT_WIDTH
from torch import Tensor, nn

CONFIG = {
    "patch_size": 1,
    "in_channels": 4 * VAE_CONFIG["latent_channels"],
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": TEXT_WIDTH,
    "pooled_projection_dim": TEXT_WIDTH,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 28, 28),
}
LAYERS = (2, 4)  # joint and single blocks of `tiny-flux`
SCHEDULER = {
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_image_seq_len": 1024,
    "base_shift": math.log(2),
    "max_image_seq_len": 4096,
    "max_shift": math.log(4),
}
TEXT_LENGTHS = (32, 128, 512)
TEXT_LENGTH_SHARES = (0.65, 0.2, 0.15)
UNIFORM_SHARE = 0.1


def make_transformer(joint: int, single: int) -> FluxTransformer2DModel:
    """A new transformer in which every block starts as the identity and the output as zero."""
    model = FluxTransformer2DModel(**CONFIG, num_layers=joint, num_single_layers=single)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")):
                nn.init.zeros_(module.weight)
    nn.init.zeros_(model.proj_out.weight)
    return model


def pack(latents: Tensor) -> Tensor:
    """[b, c, h, w] -> tokens [b, h/2 * w/2, 4c], each a 2x2 square of latents, as in `FluxPipeline`."""
    b, c, h, w = latents.shape
    squares = latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(b, h // 2 * (w // 2), 4 * c)


def image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Rotary positions [rows * columns, 3] of the tokens: (0, row, column)."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).view(-1, 3).float().to(device)


def time_shift(tokens: int) -> float:
    """mu for this many tokens, on the line that the pipeline draws between the scheduler's two points."""
    share = (tokens - SCHEDULER["base_image_seq_len"]) / (
        SCHEDULER["max_image_seq_len"] - SCHEDULER["base_image_seq_len"]
    )
    return SCHEDULER["base_shift"] + share * (SCHEDULER["max_shift"] - SCHEDULER["base_shift"])


def draw_times(count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Times s in 0..1, [count]: a tenth uniform, to see both ends, the rest logit-normal around mu."""
    device = generator.device
    normal = torch.randn(count, generator=generator, device=device)
    uniform = torch.rand(count, generator=generator, device=device)
    spread = torch.rand(count, generator=generator, device=device) < UNIFORM_SHARE
    return torch.where(spread, uniform, torch.sigmoid(normal + time_shift(tokens)))


class Flow:
    """The rectified-flow loss over precomputed latents and caption embeddings."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, material: Material) -> None:
        self.args, self.model, self.material, self.device = args, model, material, torch.device(args.device)
        self.pooled = encode_clip(args.text, material.captions, self.device)[0]
        self.states = {n: encode_t5(args.text, material.captions, n, self.device).half() for n in TEXT_LENGTHS}
        self.draw_captions = CaptionDraw(args.captions, material.classes)
        self.dice = random.Random(args.seed)

    def predict(self, noisy: Tensor, times: Tensor, captions: Tensor, length: int, side: int) -> Tensor:
        return self.model(
            hidden_states=noisy,
            timestep=times,
            pooled_projections=self.pooled[captions],
            encoder_hidden_states=self.states[length][captions].float(),
            txt_ids=torch.zeros(length, 3, device=self.device),
            img_ids=image_ids(side, side, self.device),
            return_dict=False,
        )[0]

    def loss(self, size: int, generator: torch.Generator) -> Tensor:
        """Mean squared error of the velocity for one random batch at `size` pixels."""
        count = batch_size(self.args, size)
        latents, labels, _ = self.material.known[size].draw(count, self.args.whole_share, generator)
        tokens = pack(latents)
        noise = torch.randn(tokens.shape, generator=generator, device=self.device)
        times = draw_times(count, tokens.shape[1], generator)
        noisy = torch.lerp(tokens, noise, times.view(-1, 1, 1))
        length = self.dice.choices(TEXT_LENGTHS, TEXT_LENGTH_SHARES)[0]
        captions = self.draw_captions(labels, generator)
        velocity = self.predict(noisy, times, captions, length, size // 8)
        return F.mse_loss(velocity.float(), noise - tokens)

    @torch.no_grad()
    def held_back_loss(self) -> float:
        """Mean loss at 256 px over held-back photographs and evenly spread times, the same at every call."""
        views = self.material.held_back[256]
        generator = torch.Generator(self.device).manual_seed(1)
        values = []
        parts = (views.latents[0, :256].split(64), views.labels[:256].split(64))
        for latents, labels in zip(*parts, strict=True):
            tokens = pack(latents.float())
            noise = torch.randn(tokens.shape, generator=generator, device=self.device)
            times = (torch.arange(len(tokens), device=self.device) + 0.5) / len(tokens)
            noisy = torch.lerp(tokens, noise, times.view(-1, 1, 1))
            captions = labels * self.args.captions
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                velocity = self.predict(noisy, times, captions, TEXT_LENGTHS[0], 32)
            values.append(F.mse_loss(velocity.float(), noise - tokens).item())
        return sum(values) / len(values)


def main() -> None:
    parser = option_parser(__doc__, out="build/flux")
    parser.add_argument("--layers", type=int, nargs=2, default=LAYERS, metavar=("JOINT", "SINGLE"), help="blocks")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    configure_backends()
    model = make_transformer(*args.layers)
    material = prepare(args, "flux", model)
    flow = Flow(args, model.to(args.device).train(), material)
    if args.compile:
        model.compile_repeated_blocks(dynamic=False)
    outer = ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out")
    fit(args, "flux", model, outer, flow.loss, flow.held_back_loss)


if __name__ == "__main__":
    main()
