"""Nodes for the tests: loaders of models too small for the stock loaders, and nodes that observe or change them."""

from __future__ import annotations

import logging
import time
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.latent_formats
import comfy.ldm.flux.controlnet
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.samplers
import comfy.supported_models
import comfy.utils
import torch
import transformers
from comfy_api.latest import ComfyExtension, io
from torch import Tensor, nn

from tokenmerge_models import models

_OUTPUTS = [io.Model.Output(), io.Conditioning.Output(), io.Conditioning.Output(), io.Latent.Output()]


class _SixChannels(comfy.latent_formats.LatentFormat):
    latent_channels = 6
    scale_factor = 1.0


class _TinyFlux(comfy.supported_models.Flux):
    unet_config = {"image_model": "flux", "guidance_embed": False}  # noqa: RUF012
    latent_format = _SixChannels
    # The shift of the model's own scheduler at 256 pixels.
    sampling_settings = {"shift": 0.6931471805599453}  # noqa: RUF012


_FLUX = {
    **{"image_model": "flux", "in_channels": 6, "out_channels": 6, "vec_in_dim": 96, "context_in_dim": 96},
    **{"hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 4, "depth": 2, "depth_single_blocks": 4},
    **{"axes_dim": [8, 28, 28], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": False},
}
_UNET = {
    **{"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64, "num_res_blocks": [1, 1]},
    **{"channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1]},
    **{"transformer_depth_middle": 1, "context_dim": 64, "num_heads": 4, "num_head_channels": -1, "legacy": False},
    **{"use_spatial_transformer": True, "use_linear_in_transformer": False, "adm_in_channels": None},
    **{"use_temporal_attention": False},
}
# SDXL's structure: no attention on the first level, several blocks on the next, sizes beside the pooled text.
_SDXL = {
    **_UNET,
    **{"transformer_depth": [0, 2], "transformer_depth_output": [0, 0, 2, 2], "transformer_depth_middle": 2},
    **{"use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 64 + 6 * 256},
}
_CHROMA = {
    **{"image_model": "chroma", "in_channels": 64, "out_channels": 64, "context_in_dim": 64, "hidden_size": 128},
    **{"mlp_ratio": 4.0, "num_heads": 4, "depth": 2, "depth_single_blocks": 3, "axes_dim": [8, 12, 12]},
    **{
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "in_dim": 64,
        "out_dim": 128,
        "hidden_dim": 96,
        "n_layers": 2,
    },
}
_SD3 = {
    **{"input_size": None, "in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 3, "num_patches": 256},
    **{"pos_embed_max_size": 16, "pos_embed_scaling_factor": None, "adm_in_channels": 64, "qkv_bias": True},
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 192}},
}
_WAN = {
    **{"image_model": "wan2.1", "model_type": "t2v", "dim": 96, "ffn_dim": 192, "num_layers": 3, "num_heads": 4},
    **{"in_dim": 16, "out_dim": 16, "freq_dim": 64, "text_dim": 64},
}
_QWEN = {
    **{"image_model": "qwen_image", "in_channels": 64, "num_layers": 3, "attention_head_dim": 32},
    **{"num_attention_heads": 4, "joint_attention_dim": 64, "axes_dims_rope": [8, 12, 12]},
}
_AURA = {"cond_seq_dim": 64, "n_layers": 1, "n_double_layers": 1, "dim": 64, "n_heads": 4, "max_seq": 256}
# ComfyUI's config class, its config, and the shape of a latent of 128 pixels.
_RANDOM = {
    "unet": (comfy.supported_models.SD15, _UNET, (4, 16, 16)),
    "sdxl": (comfy.supported_models.SDXL, _SDXL, (4, 16, 16)),
    "chroma": (comfy.supported_models.Chroma, _CHROMA, (16, 16, 16)),
    "sd3": (comfy.supported_models.SD3, _SD3, (16, 16, 16)),
    "wan": (comfy.supported_models.WAN21_T2V, _WAN, (16, 3, 16, 16)),
    "qwen": (comfy.supported_models.QwenImage, _QWEN, (16, 1, 16, 16)),
    # The nodes have no table for this model.
    "aura": (comfy.supported_models.AuraFlow, _AURA, (4, 16, 16)),
}


def _patcher(model: nn.Module) -> Any:
    device = comfy.model_management.get_torch_device()
    offload = comfy.model_management.unet_offload_device()
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=offload)


def _randomise(module: nn.Module, seed: int) -> None:
    """Fills the weights, which ComfyUI leaves uninitialised."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            size = parameter[0].numel()
            parameter.data = torch.randn(parameter.shape, generator=generator) / size**0.5
        else:
            parameter.data = torch.full(parameter.shape, float(name.endswith("weight")))
    for _, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.ndim > 1:
            buffer.data = 0.1 * torch.randn(buffer.shape, generator=generator)


class TestFlux(io.ComfyNode):
    """tiny-flux, with its prompt encoded by transformers alone."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("prompt"), io.Int.Input("side", default=256), io.Int.Input("batch", default=1)]
        return io.Schema(node_id="TestFlux", category="test", inputs=inputs, outputs=_OUTPUTS)

    @classmethod
    def execute(cls, prompt: str, side: int, batch: int) -> io.NodeOutput:
        folder = models()["tiny-flux"]
        weights = comfy.utils.load_torch_file(str(folder / "transformer" / "diffusion_pytorch_model.safetensors"))
        weights = {name: weight.float() for name, weight in weights.items()}
        weights = comfy.model_detection.convert_diffusers_mmdit(weights, "")
        config = _TinyFlux(dict(_FLUX))
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model(weights, "")
        model.load_model_weights(weights, "")
        conds = [_encoded(folder, text) for text in (prompt, "")]
        return io.NodeOutput(_patcher(model), *conds, {"samples": torch.zeros(batch, 6, side // 4, side // 4)})


@torch.inference_mode()
def _encoded(folder: Any, prompt: str) -> Any:
    ids = {}
    for tail, length in (("", 77), ("_2", 32)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"tokenizer{tail}")
        length = min(length, tokenizer.model_max_length)
        ids[tail] = tokenizer(prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    clip = transformers.CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    t5 = transformers.T5EncoderModel.from_pretrained(folder / "text_encoder_2", dtype=torch.float32)
    pooled = clip(ids[""].input_ids).pooler_output
    return [[t5(ids["_2"].input_ids)[0], {"pooled_output": pooled}]]


class TestRandom(io.ComfyNode):
    """A small model with random weights, and random text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Combo.Input("kind", options=list(_RANDOM)),
            io.Int.Input("batch", default=1),
            io.Int.Input("text", default=8),
            io.Int.Input("scale", default=1),
        ]
        return io.Schema(node_id="TestRandom", category="test", inputs=inputs, outputs=_OUTPUTS)

    @classmethod
    def execute(cls, kind: str, batch: int, text: int, scale: int) -> io.NodeOutput:
        make, config, (*channels, height, width) = _RANDOM[kind]
        config = make(dict(config))
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model({}, "")
        _randomise(model.diffusion_model, 0)
        generator = torch.Generator().manual_seed(1)
        conds = []
        for length in (text, 8):
            pooled = {"pooled_output": torch.randn(1, 64, generator=generator)}
            conds.append([[torch.randn(1, length, 64, generator=generator), pooled]])
        latent = torch.zeros(batch, *channels, scale * height, scale * width)
        return io.NodeOutput(_patcher(model), *conds, {"samples": latent})


class TestSplit(io.ComfyNode):
    """Gives each condition a call of its own, in all or some evaluations."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Combo.Input("when", options=["always", "odd", "late"])]
        return io.Schema(node_id="TestSplit", category="test", inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, when: str) -> io.NodeOutput:
        model = model.clone()
        count = iter(range(10**6))

        def calculate(given: dict[str, Any]) -> list[Tensor]:
            number = next(count)
            asked = (given["model"], given["input"], given["sigma"], given["model_options"])
            if not {"always": True, "odd": number % 2 == 1, "late": number > 5}[when]:
                return comfy.samplers.calc_cond_batch(asked[0], given["conds"], *asked[1:])
            cond, uncond = given["conds"]
            # The negative prompt comes first, so that the order in a step changes too.
            second = comfy.samplers.calc_cond_batch(asked[0], [uncond], *asked[1:])
            return comfy.samplers.calc_cond_batch(asked[0], [cond], *asked[1:]) + second

        model.model_options["sampler_calc_cond_batch_function"] = calculate
        return io.NodeOutput(model)


class TestCalls(io.ComfyNode):
    """Writes to the log when the model is called, and when guidance has been applied."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model")]
        return io.Schema(node_id="TestCalls", category="test", inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        def called(apply: Any, given: dict[str, Any]) -> Tensor:
            logging.info("test: called")
            return apply(given["input"], given["timestep"], **given["c"])

        def guided(given: dict[str, Any]) -> Tensor:
            logging.info("test: guided")
            return given["denoised"]

        model = model.clone()
        model.set_model_unet_function_wrapper(called)
        model.set_model_sampler_post_cfg_function(guided)
        return io.NodeOutput(model)


class TestClock(io.ComfyNode):
    """Writes to the log how long a sampler ran, including the work of nodes after this one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        # Another number for `run` keeps the result from coming from the cache.
        inputs = [io.Model.Input("model"), io.Int.Input("run", default=0)]
        return io.Schema(node_id="TestClock", category="test", inputs=inputs, outputs=[io.Model.Output()])

    @classmethod
    def execute(cls, model: Any, run: int) -> io.NodeOutput:
        def sample(executor: Any, *args: Any, **more: Any) -> Any:
            wall, busy = time.perf_counter(), time.process_time()
            samples = executor(*args, **more)
            wall, busy = time.perf_counter() - wall, time.process_time() - busy
            logging.info("sampled in %.4f s, %.4f s of the processor", wall, busy)
            return samples

        model = model.clone()
        model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE, "clock", sample)
        return io.NodeOutput(model)


class TestControlNet(io.ComfyNode):
    """A ControlNet with random weights for a MODEL, and a picture for it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.ControlNet.Output(), io.Image.Output()]
        inputs = [io.Model.Input("model"), io.Int.Input("side")]
        return io.Schema(node_id="TestControlNet", category="test", inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, model: Any, side: int) -> io.NodeOutput:
        device = comfy.model_management.get_torch_device()
        operations = comfy.ops.disable_weight_init
        if hasattr(model.model.diffusion_model, "double_blocks"):
            config = {name: value for name, value in _FLUX.items() if name not in ("image_model", "out_channels")}
            config |= {"out_channels": 6, "depth": 1, "depth_single_blocks": 1, "latent_input": False}
            network = comfy.ldm.flux.controlnet.ControlNetFlux(**config, operations=operations, dtype=torch.float32)
            network.input_hint_block[-1] = operations.Conv2d(16, 6, 3, padding=1)
        else:
            config = {name: value for name, value in _UNET.items() if name not in ("out_channels", "image_model")}
            config["transformer_depth_output"] = None
            network = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, operations=operations, dtype=torch.float32)
        _randomise(network, 3)
        control = comfy.controlnet.ControlNet(network, load_device=device)
        picture = torch.rand(1, side, side, 3, generator=torch.Generator().manual_seed(4))
        return io.NodeOutput(control, picture)


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TestFlux, TestRandom, TestSplit, TestCalls, TestClock, TestControlNet]


async def comfy_entrypoint() -> Extension:
    return Extension()
