"""Train the tokenizers and the two text encoders (CLIP and T5, under half a million parameters each).

    python training/text.py --data DATA --prompts DATA/prompts --teacher MINILM --out build/text

Both encoders learn to say which of the 102 flowers a sentence names (or that it names none) and, so that
other words have a place, to predict the sentence embedding of a MiniLM. Every output that a pipeline reads is
trained, in the way the pipeline reads it: padded, and without an attention mask. It takes about 20 minutes on
two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from captions import HELD_OUT_TEMPLATES, Captioner, read_sentences, without_flowers
from data import read_names
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CLIP_LENGTH = 77
T5_LENGTHS = (32, 64, 128, 512)
T5_LENGTH_SHARES = (0.7, 0.15, 0.1, 0.05)
VOCABULARY = 1536
WIDTH = 96
UNNAMED = -1


def train_clip_tokenizer(corpus: list[str]) -> CLIPTokenizer:
    """Byte-level BPE in CLIP's manner. Every byte is also a token at a word's end: an unknown one would
    become the end-of-text token, and CLIP pools at the first of those."""
    base = CLIPTokenizer()
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.normalizer = base.backend_tokenizer.normalizer
    tokenizer.pre_tokenizer = base.backend_tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        end_of_word_suffix="</w>",
        special_tokens=["<|startoftext|>", "<|endoftext|>"] + [f"{byte}</w>" for byte in sorted(alphabet)],
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return CLIPTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        model_max_length=CLIP_LENGTH,
    )


def train_t5_tokenizer(corpus: list[str]) -> T5Tokenizer:
    """Unigram in T5's manner. It keeps capitals, so the corpus must contain them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = T5Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return T5Tokenizer(vocab=[tuple(entry) for entry in model["vocab"]], extra_ids=0, model_max_length=max(T5_LENGTHS))


def make_clip(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def make_t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=24,
        num_heads=4,
        d_ff=192,
        num_layers=3,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return T5EncoderModel(config)


def clip_outputs(model: CLIPTextModelWithProjection, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the pipelines read. Flux reads the state at the end of the text [b, d]; SDXL reads its projection [b, d] and
    the last layer but one [b, n, d]."""
    output = model(ids, output_hidden_states=True)
    end = (ids == model.config.eos_token_id).int().argmax(dim=1)
    pooled = output.last_hidden_state[torch.arange(len(ids), device=ids.device), end]
    return pooled, output.text_embeds, output.hidden_states[-2]


def read_clip(model: CLIPTextModelWithProjection, ids: Tensor) -> list[Tensor]:
    """`clip_outputs` as vectors [b, WIDTH]: the layer becomes its mean over all positions."""
    pooled, projected, states = clip_outputs(model, ids)
    return [pooled, projected, states.mean(dim=1)]


def read_t5(model: T5EncoderModel, ids: Tensor) -> list[Tensor]:
    """T5's states as vectors [b, WIDTH]: means over all positions, padding included, and over the text alone."""
    states = model(ids)[0]
    text = (ids != model.config.pad_token_id).unsqueeze(-1)
    return [states.mean(dim=1), (states * text).sum(dim=1) / text.sum(dim=1)]


@dataclass(frozen=True)
class Sentences:
    """texts; labels int64 [n] (the flower, 102 = none of them, -1 = unknown); targets [n, 384] or none."""

    texts: list[str]
    labels: Tensor
    targets: Tensor | None


@torch.inference_mode()
def embed_sentences(folder: Path, texts: list[str]) -> Tensor:
    """Unit-length MiniLM sentence embeddings [n, 384] (mean over the tokens)."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    result = torch.empty(len(texts), model.config.hidden_size)
    for start in range(0, len(order), 128):
        chosen = order[start : start + 128]
        batch = tokenizer([texts[i] for i in chosen], padding=True, truncation=True, max_length=96, return_tensors="pt")
        states = model(**batch)[0]
        mask = batch["attention_mask"].unsqueeze(-1)
        result[chosen] = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    return result


def make_sentences(captioner: Captioner, names: list[str], others: list[str], each: int) -> tuple[list[str], Tensor]:
    """`each` captions per flower, all general sentences, and single words of the names without a label."""
    texts = [captioner.caption(name) for name in names for _ in range(each)]
    labels = [label for label in range(len(names)) for _ in range(each)]
    texts += others
    labels += [len(names)] * len(others)
    words = sorted({word for name in names for word in name.split()})
    loose = [f"a {word}" for word in words] + [f"a photo of a {word} flower" for word in words]
    return texts + loose, torch.tensor(labels + [UNNAMED] * len(loose))


def train(
    model: nn.Module,
    read: Callable[[nn.Module, Tensor], list[Tensor]],
    encode: Callable[[list[str], int | None], Tensor],
    lengths: tuple[tuple[int | None, ...], tuple[float, ...]],
    sentences: Sentences,
    captioner: Captioner,
    names: list[str],
    steps: int,
    batch: int,
) -> list[nn.Linear]:
    """Train `model` on every vector that `read` gives, each through its own heads; returns the classifiers.

    Half of a batch are `sentences`, with the teacher's embeddings, half are captions that were never seen
    before. `lengths` are the padded lengths and how often each is drawn (None: pad to the longest of the
    batch).
    """
    readouts = len(read(model, encode(sentences.texts[:2], None)))
    classifiers = [nn.Linear(WIDTH, len(names) + 1) for _ in range(readouts)]
    width = sentences.targets.shape[1] if sentences.targets is not None else 1
    regressors = [nn.Linear(WIDTH, width) for _ in range(readouts)]
    parameters = list(nn.ModuleList([model, *classifiers, *regressors]).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        length = random.choices(*lengths)[0]
        # Long padding is slow and adds little per sentence.
        half = (batch if length is None or length <= 64 else max(8, batch * 48 // length)) // 2
        chosen = torch.randint(len(sentences.texts), (half,))
        fresh = torch.randint(len(names), (half,))
        labels = torch.cat([sentences.labels[chosen], fresh])
        texts = [sentences.texts[i] for i in chosen] + [captioner.caption(names[i]) for i in fresh]
        vectors = read(model, encode(texts, length))
        loss = torch.zeros(())
        for vector, classifier, regressor in zip(vectors, classifiers, regressors, strict=True):
            loss = loss + F.cross_entropy(classifier(vector), labels, ignore_index=UNNAMED)
            if sentences.targets is not None:
                likeness = F.cosine_similarity(regressor(vector[:half]), sentences.targets[chosen], dim=-1)
                loss = loss + 2 * (1 - likeness).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"step {step}: loss {loss.item() / readouts:.3f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return classifiers


@torch.inference_mode()
def accuracy(
    model: nn.Module,
    read: Callable[[nn.Module, Tensor], list[Tensor]],
    encode: Callable[[list[str], int | None], Tensor],
    length: int,
    classifiers: list[nn.Linear],
    texts: list[str],
    labels: Tensor,
) -> list[float]:
    """The share of `texts`, padded to `length`, whose flower each readout's classifier names."""
    model.eval()
    right = torch.zeros(len(classifiers))
    for start in range(0, len(texts), 32):
        vectors = read(model, encode(texts[start : start + 32], length))
        wanted = labels[start : start + 32]
        right += torch.stack([(c(v).argmax(1) == wanted).sum() for c, v in zip(classifiers, vectors, strict=True)])
    return [round(value / len(texts), 4) for value in right.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of flower_names.json")
    parser.add_argument("--prompts", type=Path, default=Path("data/prompts"), help="folder of the prompt files")
    parser.add_argument("--teacher", type=Path, help="folder of a MiniLM sentence encoder; without it no distillation")
    parser.add_argument("--out", type=Path, default=Path("build/text"))
    parser.add_argument("--captions", type=int, default=150, help="captions per flower with a teacher's embedding")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)

    names = read_names(args.data)
    sentences = read_sentences(args.prompts)
    others = without_flowers(sentences, names)
    captioner = Captioner(others)
    texts, labels = make_sentences(captioner, names, others, args.captions)
    targets = embed_sentences(args.teacher, texts) if args.teacher else None
    pool = Sentences(texts, labels, targets)
    judge = Captioner(others, seed=1)
    test_texts = [judge.caption(name, HELD_OUT_TEMPLATES) for name in names for _ in range(10)]
    test_labels = torch.arange(len(names)).repeat_interleave(10)
    corpus = texts + sentences

    makers = {
        "clip": (
            train_clip_tokenizer,
            make_clip,
            read_clip,
            ((None, CLIP_LENGTH), (0.75, 0.25)),
            (CLIP_LENGTH,),
        ),
        "t5": (train_t5_tokenizer, make_t5, read_t5, (T5_LENGTHS, T5_LENGTH_SHARES), (32, 128, 512)),
    }
    for kind, (train_tokenizer, make, read, lengths, test_lengths) in makers.items():
        tokenizer = train_tokenizer(corpus)
        tokenizer.save_pretrained(args.out / f"tokenizer_{kind}")

        def encode(texts: list[str], length: int | None, tokenizer=tokenizer) -> Tensor:
            padding = {"padding": "longest", "max_length": CLIP_LENGTH}
            if length is not None:
                padding = {"padding": "max_length", "max_length": length}
            return tokenizer(texts, truncation=True, return_tensors="pt", **padding).input_ids

        model = make(tokenizer)
        print(f"{kind}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
        classifiers = train(model, read, encode, lengths, pool, captioner, names, args.steps, args.batch)
        for length in test_lengths:
            shares = accuracy(model, read, encode, length, classifiers, test_texts, test_labels)
            print(f"{kind}: held-out templates at length {length}: accuracy per readout {shares}", flush=True)
        model.save_pretrained(args.out / kind)


if __name__ == "__main__":
    main()
