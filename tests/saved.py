"""A tiny SDXL pipeline with text encoders, saved as a folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import tiny


def tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer whose vocabulary is hardly larger than the 256 bytes."""
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
    """Saves a tiny SDXL pipeline with text encoders."""
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
