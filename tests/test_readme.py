"""README's code runs as it stands, on a tiny SDXL pipeline saved where README names the real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import tiny
from tokenmerge.tools.cli.main import main

README = (Path(__file__).parent.parent / "README.md").read_text()
MODEL = "stabilityai/stable-diffusion-xl-base-1.0"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer whose vocabulary is little more than the bytes."""
    base = CLIPTokenizer()
    small = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    small.normalizer = base.backend_tokenizer.normalizer
    small.pre_tokenizer = base.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        end_of_word_suffix="</w>",
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    small.train_from_iterator(["a photo of a sunflower"], trainer)
    trained = json.loads(small.to_str())["model"]
    merges = [tuple(pair) for pair in trained["merges"]]
    return CLIPTokenizer(vocab=trained["vocab"], merges=merges, model_max_length=16)


def save_sdxl(folder: Path) -> Path:
    """A tiny SDXL pipeline with text encoders."""
    words = tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=tiny.TEXT_WIDTH // 2,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=tiny.POOLED_WIDTH,
        bos_token_id=0,
        eos_token_id=1,
    )
    pipe = tiny.build(
        "sdxl",
        tokenizer=words,
        tokenizer_2=words,
        text_encoder=CLIPTextModel(config).eval(),
        text_encoder_2=CLIPTextModelWithProjection(config).eval(),
    )
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sdxl(tmp_path_factory.mktemp("sdxl"))


def test_the_python_blocks_run_one_after_the_other(saved_pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("python")
    assert len(code) >= 2
    assert MODEL in code[0]
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block.replace(MODEL, str(saved_pipeline)), "README.md", "exec"), names)
    assert names["image"].size == names["merged"].size
    assert "UNet2DConditionModel (unet): toma at ratio 0.5" in capsys.readouterr().out
    assert torch.is_grad_enabled()


def test_the_printed_plan_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    assert main(["plan", "--model", str(tmp_path), "--height", "1080", "--width", "1920", "--ratio", "0.5"]) == 0
    assert f"```\n{capsys.readouterr().out}```" in README


def test_tables_are_those_of_the_result_files() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "tables.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_figure_5_can_be_drawn_anew(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "figure5.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"fig5-tiny-flux.png", "fig5-tiny-sdxl.png"}
    assert drawn <= {path.name for path in (script.parents[1] / "docs" / "reproduction").iterdir()}
