"""Tiny random denoisers of classes without a table, to test what Hold can do without one.

`DENOISERS[name].build()` makes one of that class, always with the same weights. `given(batch, height, width)` returns
the arguments of a call on a latent of that size, always the same. Lists of blocks have three blocks where the number
is free. `LEFT_OUT` says why other models in the folders of denoisers are not here. Shapes follow diffusers' own tests,
where there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tiny import TEXT_WIDTH, _seeded, noise

TEXT = 5  # tokens of a prompt
FRAMES = 2


@dataclass(frozen=True)
class Denoiser:
    """A class of diffusers in miniature.

    build: makes the denoiser. given: arguments of a call, from (batch, height, width) of a latent. time: the argument
    that changes from step to step. rises: whether pipelines pass it rising times.
    """

    build: Callable[[], Any]
    given: Callable[[int, int, int], dict[str, Any]]
    time: str = "timestep"
    rises: bool = False

    def call(self, module: nn.Module, step: int = 0, *, batch: int = 2, size: tuple[int, int] = (8, 8)) -> list[Tensor]:
        """All tensors that a call at a step returns."""
        moved = {**self.given(batch, *size), **self.times(step, batch, size)}
        with torch.no_grad():
            output = module(**moved)
        return tensors(output)

    def times(self, step: int, batch: int, size: tuple[int, int]) -> dict[str, Any]:
        begins = self.given(batch, *size)[self.time]
        return {self.time: begins * (0.4 + step / 16 if self.rises else 1.0 - step / 16)}


def tensors(output: Any) -> list[Tensor]:
    """All tensors in a denoiser's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


DENOISERS: dict[str, Denoiser] = {}


def _add(
    name: str,
    given: Callable[[int, int, int], dict[str, Any]],
    *,
    time: str = "timestep",
    rises: bool = False,
    label: str = "",
    **config: Any,
) -> None:
    """Adds a class of diffusers, or a variant of one under its own label."""
    kind = getattr(diffusers, name)
    DENOISERS[label or name] = Denoiser(lambda: _seeded(lambda: kind(**config)), given, time, rises)


# Arguments of calls


def text(batch: int, width: int = TEXT_WIDTH, tokens: int = TEXT) -> Tensor:
    return noise(batch, tokens, width, seed=1)


def image(batch: int, height: int, width: int, channels: int = 4) -> Tensor:
    return noise(batch, channels, height, width)


def video(batch: int, height: int, width: int, channels: int = 4, frames: int = FRAMES) -> Tensor:
    return noise(batch, channels, frames, height, width)


def level(batch: int, begins: float = 900.0) -> Tensor:
    return torch.full((batch,), begins)


def ids(height: int, width: int, columns: int = 3) -> Tensor:
    """[N, columns]: image number, row and column of every token."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    found = torch.zeros(height * width, columns)
    found[:, 1:3] = places
    return found


# Images

_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": TEXT_WIDTH,
    "sample_size": 8,
}
_add(
    "SanaTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "encoder_hidden_states": text(b),
        "timestep": level(b),
    },
    patch_size=1,
    **_SANA,
)
_add(
    "HunyuanDiT2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "timestep": level(b),
        "encoder_hidden_states": text(b, tokens=4),
        "text_embedding_mask": torch.ones(b, 4),
        "encoder_hidden_states_t5": text(b, tokens=4),
        "text_embedding_mask_t5": torch.ones(b, 4),
        "image_meta_size": torch.ones(b, 6),
        "style": torch.zeros(b, dtype=torch.long),
        "image_rotary_emb": (noise(h * w // 4, 8), noise(h * w // 4, 8, seed=1)),
    },
    sample_size=8,
    num_layers=6,
    patch_size=2,
    attention_head_dim=8,
    num_attention_heads=2,
    in_channels=4,
    cross_attention_dim=TEXT_WIDTH,
    cross_attention_dim_t5=TEXT_WIDTH,
    pooled_projection_dim=4,
    hidden_size=16,
    text_len=4,
    text_len_t5=4,
    activation_fn="gelu-approximate",
)
_add(
    "HiDreamImageTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "timesteps": level(b),
        "encoder_hidden_states_t5": text(b, 8, 8),
        "encoder_hidden_states_llama3": noise(6, b, 8, 4),
        "pooled_embeds": noise(b, 8),
    },
    time="timesteps",
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=3,
    num_single_layers=3,
    attention_head_dim=8,
    num_attention_heads=2,
    caption_channels=[8, 4],
    text_emb_dim=8,
    num_routed_experts=2,
    num_activated_experts=2,
    axes_dims_rope=(4, 2, 2),
    max_resolution=(16, 16),
    llama_layers=tuple(range(6)),
    force_inference_output=True,
)
_add(
    "BriaFiboTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 16),
        "encoder_hidden_states": text(b),
        "text_encoder_layers": [text(b, 12)] * 6,
        "timestep": level(b),
        "img_ids": ids(h, w),
        "txt_ids": torch.zeros(TEXT, 3),
    },
    patch_size=1,
    in_channels=16,
    num_layers=3,
    num_single_layers=3,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=TEXT_WIDTH,
    axes_dims_rope=[4, 2, 2],
    text_encoder_dim=12,
)
_add(
    "BriaFibo2Transformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "timestep": level(b, 0.9),
        "encoder_hidden_states": noise(b, 2, TEXT, TEXT_WIDTH, seed=1),
    },
    in_channels=4,
    dim=32,
    n_layers=3,
    n_refiner_layers=2,
    n_heads=2,
    cap_feat_dim=TEXT_WIDTH,
    injection_layer_ids=(1,),
    perceiver_num_layers=2,
    min_num_gist_tokens=4,
    max_num_gist_tokens=8,
    gist_step=4,
    gist_min_text_len=4,
    gist_max_text_len=16,
    axes_dims=(8, 4, 4),
    axes_lens=(64, 32, 32),
)
_add(
    "ErnieImageTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w, 16),
        "timestep": level(b),
        "text_bth": text(b),
        "text_lens": torch.full((b,), TEXT),
    },
    hidden_size=32,
    num_attention_heads=2,
    num_layers=3,
    ffn_hidden_size=32,
    in_channels=16,
    out_channels=16,
    patch_size=1,
    text_in_dim=TEXT_WIDTH,
    rope_axes_dim=(8, 4, 4),
)


def _ideogram4(b: int, h: int, w: int) -> dict[str, Any]:
    tokens = TEXT + h * w
    places = torch.zeros(b, tokens, 3, dtype=torch.long)
    places[:, TEXT:] = ids(h, w).long()
    indicator = torch.full((b, tokens), 2)
    indicator[:, :TEXT] = 3
    return {
        "hidden_states": noise(b, tokens, 16),
        "timestep": level(b, 0.9),
        "encoder_hidden_states": text(b, tokens=tokens),
        "position_ids": places,
        "segment_ids": torch.zeros(b, tokens, dtype=torch.long),
        "indicator": indicator,
    }


_add(
    "Ideogram4Transformer2DModel",
    _ideogram4,
    rises=True,
    in_channels=16,
    num_layers=3,
    attention_head_dim=16,
    num_attention_heads=2,
    intermediate_size=16,
    adaln_dim=8,
    llm_features_dim=TEXT_WIDTH,
    mrope_section=(4, 2, 2),
)
_add(
    "Flux3Transformer2DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 16),
        "encoder_hidden_states": text(b),
        "timestep": level(b, 0.9),
        "img_ids": ids(h, w, 4),
        "txt_ids": torch.zeros(TEXT, 4),
    },
    in_channels=16,
    cond_in_channels=16,
    num_layers=3,
    num_single_layers=3,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=TEXT_WIDTH,
    timestep_channels=8,
    axes_dims_rope=(2, 2, 2, 2),
)


def _omnigen(b: int, h: int, w: int) -> dict[str, Any]:
    tokens = 8 + 1 + h * w // 4
    return {
        "hidden_states": image(b, h, w),
        "timestep": level(b, 0.9),
        "input_ids": torch.arange(8).expand(b, -1),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(b, tokens, tokens),
        "position_ids": torch.arange(tokens).expand(b, -1),
    }


_add(
    "OmniGenTransformer2DModel",
    _omnigen,
    rises=True,
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=32,
    num_layers=3,
    pad_token_id=0,
    vocab_size=100,
    in_channels=4,
    time_step_dim=4,
    rope_scaling={"long_factor": [1, 2], "short_factor": [1, 2]},
    pos_embed_max_size=16,
)
_add(
    "QwenImage21Transformer2DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 8),
        "encoder_hidden_states": text(b),
        "timestep": level(b, 0.9),
        "img_shapes": [[(1, h, w)]] * b,
        "img_mask": torch.cat([torch.zeros(b, TEXT), torch.ones(b, h * w // 4)], 1).bool(),
    },
    in_channels=8,
    out_channels=8,
    num_layers=3,
    attention_head_dim=16,
    num_attention_heads=2,
    context_in_dim=TEXT_WIDTH,
    axes_dims_rope=(8, 4, 4),
)
_SIZES = ("original_size", "target_size", "crop_coords")
_add(
    "CogView3PlusTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "encoder_hidden_states": text(b),
        "timestep": level(b),
        **{name: torch.full((b, 2), 64.0) for name in _SIZES},
    },
    patch_size=2,
    in_channels=4,
    num_layers=3,
    attention_head_dim=4,
    num_attention_heads=2,
    out_channels=4,
    text_embed_dim=TEXT_WIDTH,
    time_embed_dim=8,
    condition_dim=2,
    pos_embed_max_size=8,
    sample_size=8,
)
_add(
    "GlmImageTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "encoder_hidden_states": text(b),
        "prior_token_id": torch.arange(h * w // 4).expand(b, -1),
        "prior_token_drop": torch.zeros(b, h * w // 4, dtype=torch.bool),
        "timestep": level(b),
        "target_size": torch.full((b, 2), 64.0),
        "crop_coords": torch.zeros(b, 2),
    },
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=2,
    text_embed_dim=TEXT_WIDTH,
    time_embed_dim=16,
    condition_dim=8,
    prior_vq_quantizer_codebook_size=128,
)
_add(
    "DiTTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": image(b, h, w),
        "timestep": level(b),
        "class_labels": torch.ones(b, dtype=torch.long),
    },
    in_channels=4,
    out_channels=8,
    num_attention_heads=2,
    attention_head_dim=4,
    num_layers=3,
    num_embeds_ada_norm=8,
    sample_size=8,
)


def _lumina_next(b: int, h: int, w: int) -> dict[str, Any]:
    rotary = diffusers.models.embeddings.get_2d_rotary_pos_embed_lumina(8, 16, 16)
    return {
        "hidden_states": image(b, h, w),
        "timestep": level(b, 0.9),
        "encoder_hidden_states": text(b),
        "encoder_mask": torch.ones(b, TEXT),
        "image_rotary_emb": rotary,
        "cross_attention_kwargs": {},
    }


_add(
    "LuminaNextDiT2DModel",
    _lumina_next,
    rises=True,
    sample_size=8,
    hidden_size=16,
    num_layers=3,
    num_attention_heads=2,
    num_kv_heads=1,
    multiple_of=16,
    cross_attention_dim=TEXT_WIDTH,
)
_add(
    "NucleusMoEImageTransformer2DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 16),
        "encoder_hidden_states": text(b),
        "encoder_hidden_states_mask": torch.ones(b, TEXT, dtype=torch.long),
        "timestep": level(b, 0.9),
        "img_shapes": [(1, h, w)] * b,
    },
    in_channels=16,
    out_channels=4,
    num_layers=3,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=TEXT_WIDTH,
    axes_dims_rope=(8, 4, 4),
    moe_enabled=False,
    capacity_factors=[8.0] * 3,
)
_add(
    "PRXTransformer2DModel",
    lambda b, h, w: {"hidden_states": image(b, h, w), "timestep": level(b, 0.9), "encoder_hidden_states": text(b)},
    in_channels=4,
    context_in_dim=TEXT_WIDTH,
    hidden_size=32,
    num_heads=2,
    depth=3,
    axes_dim=[8, 8],
)
_add(
    "JoyImageEditTransformer3DModel",
    lambda b, h, w: {
        "hidden_states": video(b, h, w, frames=1),
        "timestep": level(b),
        "encoder_hidden_states": text(b),
    },
    in_channels=4,
    hidden_size=32,
    num_attention_heads=2,
    text_dim=TEXT_WIDTH,
    num_layers=3,
    rope_dim_list=[4, 6, 6],
)
_add(
    "JoyImageEditPlusTransformer3DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w // 2, 4, 1, 2, 2),
        "timestep": level(b),
        "encoder_hidden_states": text(b),
        "shape_list": [[(1, h // 2, w // 2), (1, h // 2, w // 2)]] * b,
    },
    in_channels=4,
    hidden_size=32,
    num_attention_heads=2,
    text_dim=TEXT_WIDTH,
    num_layers=3,
    rope_dim_list=[4, 6, 6],
)
_add(
    "UVit2DModel",
    lambda b, h, w: {
        "input_ids": torch.arange(h * w).view(1, h, w).expand(b, -1, -1) % 16,
        "encoder_hidden_states": text(b),
        "pooled_text_emb": noise(b, 8),
        "micro_conds": torch.ones(b, 5),
    },
    time="micro_conds",
    hidden_size=32,
    cond_embed_dim=8,
    micro_cond_encode_dim=4,
    micro_cond_embed_dim=20,
    encoder_hidden_size=TEXT_WIDTH,
    vocab_size=20,
    codebook_size=16,
    in_channels=32,
    block_out_channels=32,
    num_res_blocks=2,
    block_num_heads=2,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    sample_size=8,
)

# Videos

_WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}


def _wan(b: int, h: int, w: int) -> dict[str, Any]:
    return {"hidden_states": video(b, h, w), "timestep": level(b), "encoder_hidden_states": text(b)}


_add("ChronoEditTransformer3DModel", _wan, **_WAN)
_add("SkyReelsV2Transformer3DModel", _wan, **_WAN)
_add(
    "WanVACETransformer3DModel",
    lambda b, h, w: {
        **_wan(b, h, w),
        "control_hidden_states": video(b, h, w, 12),
        "control_hidden_states_scale": torch.ones(2),
    },
    **{**_WAN, "num_layers": 6, "vace_layers": [0, 3], "vace_in_channels": 12},
)


def _wan_animate(b: int, h: int, w: int) -> dict[str, Any]:
    return {
        "hidden_states": video(b, h, w, 12, 21),
        "timestep": level(b),
        "encoder_hidden_states": text(b),
        "encoder_hidden_states_image": text(b, tokens=3),
        "pose_hidden_states": video(b, h, w, frames=20),
        "face_pixel_values": video(b, 16, 16, 3, 77),
    }


_add(
    "WanAnimateTransformer3DModel",
    _wan_animate,
    **{
        **_WAN,
        "in_channels": 12,
        "num_layers": 4,
        "latent_channels": 4,
        "image_dim": TEXT_WIDTH,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 4,
    },
)


def _anyflow(b: int, h: int, w: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(b, FRAMES, 4, h, w),
        "timestep": torch.full((b, FRAMES), 900.0),
        "r_timestep": torch.full((b, FRAMES), 250.0),
        "encoder_hidden_states": text(b),
    }


_add("AnyFlowTransformer3DModel", _anyflow, **_WAN)
_add(
    "HeliosTransformer3DModel",
    lambda b, h, w: {
        **_wan(b, h, w),
        "indices_hidden_states": torch.ones(b, FRAMES),
        "indices_latents_history_short": torch.ones(b, 1),
        "indices_latents_history_mid": torch.ones(b, 1),
        "indices_latents_history_long": torch.ones(b, 4),
        "latents_history_short": video(b, h, w, frames=1),
        "latents_history_mid": video(b, h, w, frames=1),
        "latents_history_long": video(b, h, w, frames=4),
    },
    rope_dim=(4, 4, 4),
    **{name: value for name, value in _WAN.items() if name != "rope_max_seq_len"},
)
_LTX2 = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8,
    "num_layers": 3,
    "caption_channels": TEXT_WIDTH,
}
_add(
    "LTX2VideoTransformer3DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, FRAMES * h * w, 8),
        "audio_hidden_states": noise(b, 9, 4),
        "encoder_hidden_states": text(b),
        "audio_encoder_hidden_states": text(b),
        "timestep": level(b),
        "num_frames": FRAMES,
        "height": h,
        "width": w,
        "audio_num_frames": 9,
    },
    **_LTX2,
)
_K6 = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "time_dim": 16,
    "model_dim": 16,
    "ff_dim": 32,
    "num_visual_blocks": 3,
    "axes_dims": (4, 2, 2),
}


def _kandinsky6(b: int, h: int, w: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(b, FRAMES, h, w, 9),
        "encoder_hidden_states": text(b),
        "pooled_projections": noise(b, 8),
        "timestep": level(b),
    }


_K6_TEXT = {"in_text_dim": TEXT_WIDTH, "in_text_dim2": 8, "num_text_blocks": 2, "in_audio_dim": 4, "out_audio_dim": 4}
_add("Kandinsky6Transformer3DModel", _kandinsky6, **_K6, **_K6_TEXT)
_add(
    "Kandinsky6Transformer3DModel",
    lambda b, h, w: {**_kandinsky6(b, h, w), "audio_hidden_states": noise(b, 7, 4)},
    label="Kandinsky6Transformer3DModel with sound",
    **_K6,
    **_K6_TEXT,
)
_add(
    "LatteTransformer3DModel",
    lambda b, h, w: {**_wan(b, h, w), "enable_temporal_attentions": True},
    sample_size=8,
    num_layers=3,
    patch_size=2,
    attention_head_dim=4,
    num_attention_heads=2,
    caption_channels=TEXT_WIDTH,
    in_channels=4,
    cross_attention_dim=8,
    out_channels=8,
    attention_bias=True,
    activation_fn="gelu-approximate",
    num_embeds_ada_norm=1000,
    norm_type="ada_norm_single",
    norm_elementwise_affine=False,
    norm_eps=1e-6,
    video_length=FRAMES,
)
_add(
    "AllegroTransformer3DModel",
    _wan,
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    num_layers=3,
    cross_attention_dim=16,
    sample_width=8,
    sample_height=8,
    sample_frames=8,
    caption_channels=TEXT_WIDTH,
)
_add(
    "CosmosTransformer3DModel",
    lambda b, h, w: {
        **_wan(b, h, w),
        "attention_mask": torch.ones(b, TEXT),
        "fps": 30,
    },
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=12,
    num_layers=3,
    mlp_ratio=2,
    text_embed_dim=TEXT_WIDTH,
    adaln_lora_dim=4,
    max_size=(4, 32, 32),
    # A padding mask is resized by torchvision, which may not be installed.
    concat_padding_mask=False,
)
_add(
    "ConsisIDTransformer3DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, 1, 4, h, w),
        "encoder_hidden_states": text(b, tokens=8),
        "timestep": level(b),
        "id_vit_hidden": [noise(b, 2, 2)],
        "id_cond": noise(b, 2),
    },
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    time_embed_dim=2,
    text_embed_dim=TEXT_WIDTH,
    num_layers=4,
    sample_width=8,
    sample_height=8,
    sample_frames=1,
    max_text_seq_length=8,
    cross_attn_interval=2,
    is_train_face=True,
    cross_attn_dim_head=1,
    cross_attn_num_heads=1,
    LFE_id_dim=2,
    LFE_vit_dim=2,
    LFE_depth=5,
    LFE_dim_head=8,
    LFE_num_heads=2,
    LFE_num_id_token=1,
    LFE_num_querie=1,
    LFE_output_dim=10,
    LFE_ff_mult=1,
    LFE_num_scale=1,
)
_add(
    "EasyAnimateTransformer3DModel",
    _wan,
    attention_head_dim=16,
    num_attention_heads=2,
    in_channels=4,
    mmdit_layers=3,
    num_layers=3,
    out_channels=4,
    patch_size=2,
    text_embed_dim=TEXT_WIDTH,
    time_embed_dim=8,
)
_add(
    "HunyuanVideoFramepackTransformer3DModel",
    lambda b, h, w: {
        **_wan(b, h, w),
        "encoder_attention_mask": torch.ones(b, TEXT),
        "pooled_projections": noise(b, 8),
        "image_embeds": text(b, tokens=3),
        "indices_latents": torch.ones(FRAMES),
        "guidance": level(b, 6000.0),
        "latents_clean": video(b, h, w, frames=1),
        "indices_latents_clean": torch.ones(1),
        "latents_history_2x": video(b, h, w, frames=2),
        "indices_latents_history_2x": torch.ones(2),
        "latents_history_4x": video(b, h, w, frames=4),
        "indices_latents_history_4x": torch.ones(4),
    },
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=10,
    num_layers=3,
    num_single_layers=3,
    num_refiner_layers=2,
    text_embed_dim=TEXT_WIDTH,
    pooled_projection_dim=8,
    rope_axes_dim=(2, 4, 4),
    has_image_proj=True,
    image_proj_dim=TEXT_WIDTH,
    has_clean_x_embedder=True,
)
_add(
    "MotifVideoTransformer3DModel",
    _wan,
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=12,
    num_layers=3,
    num_single_layers=3,
    num_decoder_layers=2,
    text_embed_dim=TEXT_WIDTH,
    rope_axes_dim=(4, 4, 4),
)
_add(
    "SanaVideoTransformer3DModel",
    _wan,
    patch_size=(1, 2, 2),
    rope_max_seq_len=32,
    **{**_SANA, "attention_head_dim": 12, "cross_attention_head_dim": 12, "cross_attention_dim": 24},
)


def _minimax(b: int, h: int, w: int) -> dict[str, Any]:
    """Arguments with text, then sound, then video in one sequence."""
    sound, tokens = 6, TEXT + 6 + h * w
    tags = torch.zeros(tokens, dtype=torch.long)
    tags[:TEXT], tags[TEXT : TEXT + sound] = 1, 2
    places = torch.zeros(tokens, 3)
    places[TEXT + sound :] = ids(h, w)
    return {
        "hidden_states": noise(b, h * w, 16),
        "audio_hidden_states": noise(b, sound, 6),
        "encoder_hidden_states": text(b),
        "timestep": torch.tensor([0.9, 0.5]),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": places,
        "video_indices": torch.arange(TEXT + sound, tokens),
        "audio_indices": torch.arange(TEXT, TEXT + sound),
        "text_indices": torch.arange(TEXT),
    }


_add(
    "MiniMaxH3Transformer3DModel",
    _minimax,
    num_attention_heads=2,
    attention_head_dim=16,
    hidden_size=24,
    num_layers=3,
    num_refiner_layers=2,
    ffn_dim=32,
    in_channels=4,
    audio_in_channels=6,
    text_dim=TEXT_WIDTH,
    freq_dim=8,
    time_embed_hidden_dim=24,
    time_embed_dim=16,
    rope_freq_dim=2,
)

# Sound

_add(
    "AceStepTransformer1DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 8),
        "timestep": level(b, 0.9),
        "timestep_r": level(b, 0.9),
        "encoder_hidden_states": text(b, 32),
        "context_latents": noise(b, h * w, 16),
    },
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    in_channels=24,
    audio_acoustic_hidden_dim=8,
    sliding_window=16,
)
_add(
    "LongCatAudioDiTTransformer",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 8),
        "encoder_hidden_states": text(b),
        "encoder_attention_mask": torch.ones(b, TEXT, dtype=torch.bool),
        "timestep": level(b, 0.9),
        "attention_mask": torch.ones(b, h * w, dtype=torch.bool),
    },
    rises=True,
    dit_dim=32,
    dit_depth=3,
    dit_heads=2,
    dit_text_dim=TEXT_WIDTH,
    latent_dim=8,
    text_conv=False,
)
_add(
    "MiniMaxMusic3Transformer1DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, 8, h * w),
        "timestep": level(b, 0.9),
        "encoder_hidden_states": text(b, tokens=h * w),
    },
    in_channels=8,
    condition_dim=TEXT_WIDTH,
    num_layers=3,
    num_attention_heads=2,
    attention_head_dim=8,
    ff_inner_dim=32,
    rotary_dim=4,
    fourier_embedding_dim=8,
)
_add(
    "StableAudioDiTModel",
    lambda b, h, w: {
        "hidden_states": noise(b, 4, h * w),
        "timestep": level(b, 0.9),
        "encoder_hidden_states": text(b),
        "global_hidden_states": noise(b, 1, 8),
        "rotary_embedding": (noise(h * w + 1, 4), noise(h * w + 1, 4, seed=1)),
    },
    sample_size=64,
    in_channels=4,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=2,
    num_key_value_attention_heads=2,
    out_channels=4,
    cross_attention_dim=16,
    time_proj_dim=8,
    global_states_input_dim=8,
    cross_attention_input_dim=TEXT_WIDTH,
)
_add(
    "StableAudio3DiTModel",
    lambda b, h, w: {
        "hidden_states": noise(b, 8, h * w),
        "timestep": level(b, 0.9),
        "encoder_hidden_states": text(b),
        "global_hidden_states": noise(b, 12),
    },
    io_channels=8,
    embed_dim=32,
    depth=3,
    num_heads=4,
    cond_token_dim=TEXT_WIDTH,
    global_cond_dim=12,
    local_add_cond_dim=5,
    timestep_features_dim=16,
    ff_mult=2,
    num_memory_tokens=3,
    use_differential_attention=False,
)

# Denoisers that work in several chunks, cache keys and values, or make something other than pictures

_add(
    "AnyFlowFARTransformer3DModel",
    lambda b, h, w: {**_anyflow(b, h, w), "chunk_partition": [1, 1]},
    compressed_patch_size=(1, 4, 4),
    full_chunk_limit=3,
    **_WAN,
)
_add(
    "SanaWMTransformer3DModel",
    lambda b, h, w: {
        "hidden_states": video(b, h, w),
        "timestep": torch.full((b, 1, FRAMES), 900.0),
        "encoder_hidden_states": noise(b, 1, TEXT, TEXT_WIDTH, seed=1),
        "encoder_attention_mask": torch.ones(b, TEXT),
    },
    in_channels=4,
    num_layers=4,
    hidden_size=32,
    num_attention_heads=2,
    linear_head_dim=16,
    caption_channels=TEXT_WIDTH,
    chunk_plucker_post_attn_blocks=4,
    image_size=64,
    mixed_precision="no",
)
_add(
    "SanaWMLTX2RefinerTransformer3DModel",
    lambda b, h, w: {
        "hidden_states": noise(b, h * w, 8),
        "encoder_hidden_states": text(b),
        "timestep": torch.full((b, h * w), 900.0),
        "video_rotary_emb": (noise(b, h * w, 16), noise(b, h * w, 16, seed=1)),
    },
    **_LTX2,
)
_add(
    "Cosmos3OmniTransformer",
    lambda b, h, w: {
        "input_ids": torch.tensor([1, 2]),
        "text_indexes": torch.tensor([0, 1]),
        "position_ids": torch.zeros(3, 2 + h * w, dtype=torch.long),
        "und_len": 2,
        "sequence_length": 2 + h * w,
        "vision_tokens": [noise(1, 2, 1, h, w)],
        "vision_token_shapes": [(1, h, w)],
        "vision_sequence_indexes": torch.arange(2, 2 + h * w),
        "vision_mse_loss_indexes": torch.arange(2, 2 + h * w),
        "vision_timesteps": torch.full((h * w,), 900.0),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    },
    time="vision_timesteps",
    head_dim=6,
    hidden_act="relu2",
    hidden_size=12,
    intermediate_size=24,
    latent_channel=2,
    latent_patch_size=1,
    num_attention_heads=2,
    num_hidden_layers=3,
    num_key_value_heads=1,
    patch_latent_dim=2,
    qk_norm_for_text=False,
    rope_axes_dim=[1, 1, 1],
    rope_theta=1e8,
    vocab_size=32,
)
_add(
    "PriorTransformer",
    lambda b, h, w: {
        "hidden_states": noise(b, 8),
        "timestep": level(b),
        "proj_embedding": noise(b, 8, seed=1),
        "encoder_hidden_states": text(b, 8),
    },
    num_attention_heads=2,
    attention_head_dim=4,
    num_layers=3,
    embedding_dim=8,
    num_embeddings=TEXT,
)
_add(
    "T5FilmDecoder",
    lambda b, h, w: {
        "encodings_and_masks": [(text(b), torch.ones(b, TEXT))],
        "decoder_input_tokens": noise(b, h, 8),
        "decoder_noise_time": level(b, 0.9),
    },
    time="decoder_noise_time",
    input_dims=8,
    targets_length=16,
    d_model=TEXT_WIDTH,
    num_layers=3,
    num_heads=2,
    d_kv=8,
    d_ff=16,
)

# UNets

_STAGES = {"in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "norm_num_groups": 4}
_add(
    "UNet2DModel",
    lambda b, h, w: {"sample": image(b, h, w), "timestep": level(b)},
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
    **_STAGES,
)
_add(
    "UNet1DModel",
    lambda b, h, w: {"sample": noise(b, 14, h * w), "timestep": level(b)},
    block_out_channels=(8, 8, 16, 16),
    in_channels=14,
    out_channels=14,
    time_embedding_type="positional",
    use_timestep_embedding=True,
    flip_sin_to_cos=False,
    freq_shift=1.0,
    out_block_type="OutConv1DBlock",
    mid_block_type="MidResTemporalBlock1D",
    down_block_types=("DownResnetBlock1D",) * 4,
    up_block_types=("UpResnetBlock1D",) * 3,
    act_fn="swish",
)


def _unet(b: int, h: int, w: int) -> dict[str, Any]:
    return {"sample": image(b, h, w), "timestep": level(b), "encoder_hidden_states": text(b)}


_3D = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": TEXT_WIDTH,
    "attention_head_dim": 2,
    "layers_per_block": 1,
    "sample_size": 8,
}
_add("UNet3DConditionModel", lambda b, h, w: {**_unet(b, h, w), "sample": video(b, h, w)}, **_STAGES, **_3D)
_add(
    "I2VGenXLUNet",
    lambda b, h, w: {
        **_unet(b, h, w),
        "sample": video(b, h, w),
        "fps": torch.full((b,), 16),
        "image_latents": video(b, h, w),
        "image_embeddings": noise(b, TEXT_WIDTH),
    },
    **{**_STAGES, "block_out_channels": (32, 64), "norm_num_groups": 32},
    **{**_3D, "attention_head_dim": 8},
)
_add(
    "UNetMotionModel",
    lambda b, h, w: {**_unet(b * FRAMES, h, w), "sample": video(b, h, w), "timestep": level(b)},
    down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
    up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
    cross_attention_dim=TEXT_WIDTH,
    num_attention_heads=2,
    motion_num_attention_heads=2,
    layers_per_block=1,
    transformer_layers_per_block=2,
    **{**_STAGES, "block_out_channels": (16, 32)},
)
_add(
    "DreamLiteUNetModel",
    _unet,
    sample_size=8,
    down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
    up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
    cross_attention_dim=TEXT_WIDTH,
    attention_head_dim=8,
    layers_per_block=1,
    transformer_layers_per_block=2,
    **{**_STAGES, "block_out_channels": (32, 64), "norm_num_groups": 8},
)
_add(
    "Kandinsky3UNet",
    lambda b, h, w: {**_unet(b, h, w), "encoder_attention_mask": torch.ones(b, TEXT)},
    in_channels=4,
    time_embedding_dim=8,
    groups=2,
    attention_head_dim=4,
    layers_per_block=3,
    block_out_channels=(16, 32),
    cross_attention_dim=8,
    encoder_hid_dim=TEXT_WIDTH,
)
_add(
    "StableCascadeUNet",
    lambda b, h, w: {
        "sample": image(b, h, w),
        "timestep_ratio": level(b, 0.9),
        "clip_text_pooled": noise(b, 1, 8),
    },
    time="timestep_ratio",
    in_channels=4,
    out_channels=4,
    conditioning_dim=16,
    block_out_channels=(16, 32),
    num_attention_heads=(1, 2),
    down_num_layers_per_block=(2, 2),
    up_num_layers_per_block=(2, 2),
    clip_text_pooled_in_channels=8,
    dropout=(0.0, 0.0),
)
_add(
    "AudioLDM2UNet2DConditionModel",
    _unet,
    sample_size=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=(TEXT_WIDTH, TEXT_WIDTH),
    transformer_layers_per_block=2,
    attention_head_dim=4,
    layers_per_block=1,
    **_STAGES,
)

# The other models in the folders of denoisers, and why they are not tried.
LEFT_OUT = {
    "DreamLiteTransformer2DModel": "part of a UNet",
    "Kandinsky6SRTransformer3DModel": "its sparse attention does not compile on a CPU",
    "MiniMaxMusic3RVQDepthDecoder": "no denoiser: it makes tokens one by one",
    "MotionAdapter": "part of a UNet",
    "RFD4ProteinaTransformer": "wants molecules that its pipeline prepares",
    "Transformer2DModel": "part of a UNet",
    "TransformerTemporalModel": "part of a UNet",
    "WanAnimate2Transformer3DModel": "reads a cache that a pass over another video fills",
}
