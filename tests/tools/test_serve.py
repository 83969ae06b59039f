"""The server: requests, refusals and batches; and a real server whose clients leave and whose processes are killed."""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

import tiny
from saved import save_sdxl
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.config import LARGEST_SEED, Techniques
from tokenmerge.tools.addresses import is_loopback
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.serving import keys
from tokenmerge.tools.serving.batching import Drawn, Failed, Queue, Waiting
from tokenmerge.tools.serving.offer import Limits, Offer, Serving
from tokenmerge.tools.serving.processes import check_listeners
from tokenmerge.tools.serving.requests import Job, Refusal, Settings, read_order
from tokenmerge.tools.serving.run import application
from tokenmerge.tools.serving.sharing import may_share
from tokenmerge.tools.serving.worker import Worker
from tokenmerge.tools.speeds import BATCHED_SPEEDS

OFFER = Offer(
    model="tiny",
    size=(64, 64),
    steps=4,
    speed="balanced",
    batched=dict.fromkeys(BATCHED_SPEEDS, True),
    unit=8,
    least=8,
    limits=Limits(side=128, steps=60, n=10, prompt=400),
)
# Occurs only in prompts, so that finding it anywhere else is a leak.
SECRET = "quixotic-zeppelin"
KEY = "a-key-for-the-tests-alone"


# Requests.


def test_a_request_has_defaults() -> None:
    order = read_order(b'{"prompt": "a rose"}', OFFER)
    assert (order.n, order.settings) == (1, Settings(64, 64, 4, "balanced"))
    assert order.seed != read_order(b'{"prompt": "a rose"}', OFFER).seed
    typed = {"prompt": "a rose", "model": "tiny", "n": 2, "size": "128x64", "response_format": "b64_json"}
    typed |= {"seed": 7, "steps": 9, "speed": "fast", "user": "somebody"}
    order = read_order(json.dumps(typed).encode(), OFFER)
    assert order.jobs() == [Job("a rose", seed, Settings(128, 64, 9, "fast")) for seed in (7, 8)]
    assert read_order(b'{"prompt": "a rose", "size": "auto", "seed": null}', OFFER).settings.width == 64


# Request bodies, and words of their refusals.
REFUSED: list[tuple[Any, str]] = [
    ({}, "prompt is missing or empty"),
    ({"prompt": " "}, "prompt is missing or empty"),
    ({"prompt": ["a rose"]}, "it must be a text"),
    ({"prompt": "x" * 401}, "prompt has 401 characters; the limit is 400"),
    ({"prompt": "\ud800"}, "half of a surrogate pair"),
    ({"prompt": "x" * 40_000}, "bytes; the limit is"),
    ({"n": 0}, "n is 0; it must be a whole number from 1 to 10 pictures"),
    ({"n": 11}, "n is 11; it must be a whole number from 1 to 10 pictures"),
    ({"n": 1.5}, "n is 1.5"),
    ({"n": True}, "n is True"),
    ({"steps": 61}, "steps is 61; it must be a whole number from 1 to 60 steps"),
    ({"steps": "4"}, "steps is '4'"),
    ({"steps": 10**400}, "steps is a huge number"),
    ({"size": "64"}, "size is '64'; write width x height, as in '512x384'"),
    ({"size": 64}, "size is 64"),
    ({"size": "1" * 5000 + "x64"}, "write width x height"),
    ({"size": "136x64"}, "size is 136x64; both sides must be multiples of 8, from 8 to 128"),
    ({"size": "64x60"}, "both sides must be multiples of 8"),
    ({"seed": -1}, "seed is -1; seeds are whole numbers from 0 to 9223372036854775807"),
    ({"seed": LARGEST_SEED, "n": 2}, "seeds are whole numbers from 0 to"),
    ({"speed": "warp"}, "speed is 'warp'; choose from plain, careful, balanced, fast, fastest"),
    ({"speed": ["fast"]}, "speed is a list"),
    ({"response_format": "url"}, "response_format is 'url'; only 'b64_json' is served"),
    ({"promt": "a rose"}, "the field 'promt' is unknown (did you mean 'prompt'?)"),
    ([], "the body is not an object"),
    (b"{", "the body is not JSON"),
    (b"\xff\xfe", "the body is not JSON"),
    (b"[" * 15_000, "the body is not JSON"),
]


def body_of(what: Any) -> bytes:
    if isinstance(what, bytes):
        return what
    fills = isinstance(what, dict) and what and not {"prompt", "promt"} & what.keys()
    return json.dumps({"prompt": "a rose", **what} if fills else what).encode()


@pytest.mark.parametrize(("what", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_beyond_limits_is_refused_with_a_sentence(what: Any, words: str) -> None:
    with pytest.raises(Refusal) as refused:
        read_order(body_of(what), OFFER)
    assert refused.value.status == 400
    assert words in refused.value.message
    assert len(refused.value.message) < 300


# Batches.


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_a_merge_shares_a_batch_where_destinations_are_of_each_sample(kind: str) -> None:
    denoiser = tiny.denoiser_of(tiny.build(kind))
    for techniques in BATCHED_SPEEDS.values():
        assert techniques.merge is not None or may_share(techniques, denoiser) == (
            techniques.hold is None or techniques.hold.every is not None
        )
    own = kind != "flux"
    assert may_share(Techniques(Merge()), denoiser) == own
    assert may_share(Techniques(Merge(), Hold(every=3)), denoiser) == own
    assert not may_share(Techniques(Merge(selection="random")), denoiser)
    assert not may_share(Techniques(Merge(method="tomesd", selection="random")), denoiser)


def test_a_hold_that_decides_for_a_batch_shares_none() -> None:
    denoiser = tiny.denoiser_of(tiny.build("sdxl"))
    assert not may_share(Techniques(hold=Hold()), denoiser)
    assert may_share(Techniques(hold=Hold(every=3)), denoiser)
    assert may_share(Techniques(), denoiser)


def test_a_batch_has_the_oldest_job_and_others_of_its_settings() -> None:
    loop = asyncio.new_event_loop()
    small, large = Settings(64, 64, 4, "plain"), Settings(128, 64, 4, "plain")
    alone = Settings(64, 64, 4, "fast")
    queue = Queue(3, {"plain": True, "fast": False})
    jobs = [Job("a", seed, settings) for seed, settings in enumerate([small, large, small, alone, small, small, alone])]
    waiting = [Waiting(job, loop.create_future()) for job in jobs]
    for each in waiting:
        queue.add(each)
    waiting[2].answer.cancel()
    taken = [[each.job.seed for each in queue.take()] for _ in range(5)]
    assert taken == [[0, 4, 5], [1], [3], [6], []]
    loop.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sdxl(tmp_path_factory.mktemp("serve") / "tiny")


def drawn_by(worker: Worker, jobs: list[Job]) -> list[Drawn | Failed]:
    async def draw() -> list[Drawn | Failed]:
        return await asyncio.gather(*map(worker.draw, jobs))

    return asyncio.run(draw())


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_a_worker_draws_each_picture_as_it_would_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(BATCHED_SPEEDS, "merged", Techniques(Merge(ratio=0.5), Hold(every=2, start=0.0)))
    batched = {"merged": True, "plain": False}
    worker = Worker(Serving(model=str(model), device="cpu", max_batch=4, cluster="auto"), batched)
    settings = Settings(64, 64, 4, "merged")
    jobs = [Job(f"a rose {number}", number, settings) for number in range(4)]
    alone = [drawn_by(worker, [job])[0] for job in jobs]
    together = drawn_by(worker, jobs)
    for one, other in zip(alone, together, strict=True):
        assert np.abs(pixels(one.png) - pixels(other.png)).max() <= 1
    assert np.abs(pixels(alone[0].png) - pixels(alone[1].png)).max() > 8
    reports = [each.report for each in together if each.report]
    assert [(report.size, sum(report.steps.values())) for report in reports] == [(4, 4)]
    assert {"merged", "held"} == reports[0].steps.keys()
    apart = drawn_by(worker, [Job("a rose", seed, settings._replace(speed="plain")) for seed in range(2)])
    assert [(each.report.size, each.report.steps) for each in apart] == [(1, {"full": 4})] * 2
    # The pipeline itself refuses this size; its own message must not reach the client.
    (failed,) = drawn_by(worker, [Job(SECRET, 0, settings._replace(width=61))])
    assert (failed.status, failed.message) == (500, "the pipeline failed with ValueError; the server's log says where")
    assert SECRET not in caplog.text
    assert isinstance(drawn_by(worker, jobs[:1])[0], Drawn)


# Keys and listeners.


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of tests\n\n{KEY}\n  another-key-for-tests \n")
    digests = keys.read_keys(path)
    assert keys.is_known(f"Bearer {KEY}", digests)
    assert keys.is_known("bearer another-key-for-tests", digests)
    for wrong in (None, "", KEY, f"Basic {KEY}", f"Bearer {KEY[:-1]}", "Bearer", "Bearer # of tests"):
        assert not keys.is_known(wrong, digests)
    for content, words in (("# none\n", "has no key"), ("short\n", "fewer than 16 characters")):
        path.write_text(content)
        with pytest.raises(TokenMergeError, match=words):
            keys.read_keys(path)
    with pytest.raises(TokenMergeError, match="cannot be read"):
        keys.read_keys(tmp_path / "missing")


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compare_digest` compares digests of equal length, and every one of them even after a match."""
    seen = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(keys, "compare_digest", compare)
    digests = tuple(map(keys.digest, (KEY, "a-second-key-of-tests", "x" * 100)))
    assert keys.is_known(f"Bearer {KEY}", digests)
    assert not keys.is_known("Bearer no", digests)
    assert seen == [(32, 32)] * 6


def test_loopback_is_told_from_other_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.2", "::ffff:192.0.2.2")))


def test_no_listener_but_the_one_that_was_asked_for_may_be_beyond_loopback() -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all, socket.create_server(("127.0.0.1", 0)):
        port = open_to_all.getsockname()[1]
        check_listeners("0.0.0.0", port)
        for asked in (("0.0.0.0", port - 1), ("127.0.0.1", port), ("localhost", port)):
            with pytest.raises(TokenMergeError, match=f"listens on 0.0.0.0 port {port}, not on loopback alone"):
                check_listeners(*asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0 lets everybody draw; give --keys FILE, or leave --host at 127.0.0.1"),
        ("--host nowhere.invalid", "is not an address of this machine"),
        ("--keys /nowhere/keys", "/nowhere/keys cannot be read (No such file or directory); give another --keys"),
        ("--replicas 0", "--replicas: 0 is out of range; it must be 1 or more"),
        ("--max-batch 0", "--max-batch: 0 is out of range; it must be 1 or more"),
        ("--max-queue 0", "--max-queue: 0 is out of range; it must be 1 or more"),
        ("--timeout 0", "--timeout: 0.0 is out of range; it must be above 0"),
        ("--port 70000", "--port: 70000 is out of range; it must be from 1 to 65535"),
        ("--speed warp", "--speed: invalid choice: 'warp'"),
        ("--max-side 128 --model tiny-flux", "draws 256x256 by default, but --max-side is 128; raise it"),
    ],
)
def test_what_cannot_be_served_is_told_before_anything_starts(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--device", "cpu", *options.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("tokenmerge: ")
    assert printed.count("\n") == 1
    assert words in printed


def test_a_model_with_a_pipeline_of_its_own_is_told_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "own")
    index = json.loads((model / "model_index.json").read_text())
    (tmp_path / "own" / "model_index.json").write_text(json.dumps({**index, "_class_name": ["code", "OwnPipeline"]}))
    assert main(["serve", "--device", "cpu", "--model", str(tmp_path / "own"), "--port", str(free_port())]) == 2
    assert "is a code.OwnPipeline, which is not a diffusers pipeline" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--device", "cpu", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} is not available (Address already in use); give another" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["ray", "ray.serve", "starlette.requests", "prometheus_client"])
def test_a_missing_extra_is_named(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenmerge.tools.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve", "--device", "cpu", "--port", str(free_port())]) == 2
    assert capsys.readouterr().err == f"tokenmerge: {package} is not installed; pip install tokenmerge[serve]\n"


# Clusters.


def test_the_recipe_for_a_cluster_is_one_that_ray_takes(model: Path) -> None:
    from ray._common.utils import import_attr
    from ray.serve._private.build_app import build_app
    from ray.serve.schema import ServeDeploySchema

    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    recipe = ServeDeploySchema.model_validate(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    (described,) = recipe.applications
    build = import_attr(described.import_path)
    assert build is application
    # A local model, since tests do not reach the hub.
    bound = build({**described.args, "model": str(model), "device": "cpu"})
    built = build_app(bound, name="it", make_deployment_handle=lambda deployment, name: None)
    deployments = {each.name: each for each in built.deployments}
    assert deployments.keys() == {"Front", "Worker"}
    (options,) = (each.model_dump(exclude_unset=True) for each in described.deployments)
    assert options.pop("name") == "Worker"
    scaled = deployments["Worker"].options(**options, num_replicas="auto")
    assert scaled._deployment_config.autoscaling_config.max_replicas == 8


def test_arguments_for_a_cluster_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TokenMergeError, match=r"args has 'modle' \(did you mean 'model'\?\); use any of model, host"):
        application({"modle": "tiny-flux"})
    with pytest.raises(TokenMergeError, match="cannot be read"):
        application({"model": "tiny-flux", "keys": str(tmp_path / "none")})


# A real server.


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Server:
    """A server in its own process."""

    process: psutil.Process
    port: int
    folder: Path  # Ray's files
    output: Path
    ending: list[psutil.Process] = field(default_factory=list)  # its processes at the interrupt

    def ask(self, path: str, body: bytes | None = None, key: str | None = KEY, timeout: float = 60) -> Answer:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())

    def draw(self, **fields: Any) -> Answer:
        fields = {"prompt": "a rose", "size": "64x64", "steps": 4, **fields}
        return self.ask("/v1/images/generations", json.dumps(fields).encode())

    def pictures(self, **fields: Any) -> list[np.ndarray]:
        answer = self.draw(**fields)
        assert answer.status == 200, answer.body
        return [pixels(base64.b64decode(each["b64_json"])) for each in answer.data["data"]]

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics").body.decode().splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith((f"tokenmerge_{name} ", f"tokenmerge_{name}{{"))
        )

    def wait(self, true: Callable[[], bool], seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until
            time.sleep(0.1)

    @property
    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def replicas(self, of: str) -> list[psutil.Process]:
        return [each for each in self.family if f"ServeReplica:tokenmerge:{of}" in " ".join(each.cmdline())]

    def interrupt(self) -> None:
        self.ending.extend(self.family)
        # Ctrl-C in a terminal reaches the whole process group.
        os.killpg(self.process.pid, signal.SIGINT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """Two replicas, batches of four, a queue of twelve, open to all addresses with a key. It leaves nothing behind."""
    # Ray puts sockets into this folder, and socket paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    (folder / "keys").write_text(f"{KEY}\n")
    output, port = folder / "output", free_port()
    options = f"--host 0.0.0.0 --port {port} --keys {folder / 'keys'} --logs {folder / 'ray'} --device cpu"
    options += " --replicas 2 --max-batch 4 --max-queue 12 --max-side 128 --max-steps 60 --max-prompt 400"
    command = [sys.executable, "-m", "tokenmerge", "serve", "--model", str(model), *options.split()]
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    started = Server(psutil.Process(process.pid), port, folder / "ray", output)
    left: list[psutil.Process] = []
    try:
        started.wait(lambda: "serving " in output.read_text() or process.poll() is not None, 300)
        assert process.poll() is None, output.read_text()
        yield started
        if not started.ending:
            started.interrupt()
        process.wait(60)
        _, left = psutil.wait_procs(started.ending, 5)
    finally:
        for each in {*left, *(started.family if process.poll() is None else [])}:
            each.kill()
        printed = output.read_text()
        shutil.rmtree(folder)
    assert process.returncode == 130
    assert printed.endswith("tokenmerge: interrupted\n")
    assert not left


def together(server: Server, requests: list[dict[str, Any]]) -> list[Answer]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda fields: server.draw(**fields), requests))


def test_pictures_come_as_openai_has_them(server: Server) -> None:
    answer = server.draw(prompt=SECRET, n=2, seed=3, model="tiny", response_format="b64_json")
    assert answer.status == 200
    assert abs(answer.data["created"] - time.time()) < 60
    assert [each["seed"] for each in answer.data["data"]] == [3, 4]
    first, second = (Image.open(io.BytesIO(base64.b64decode(each["b64_json"]))) for each in answer.data["data"])
    assert (first.format, first.size, second.size) == ("PNG", (64, 64), (64, 64))
    assert first.tobytes() != second.tobytes()
    (model,) = server.ask("/v1/models").data["data"]
    assert (model["id"], model["object"], model["tokenmerge"]["limits"]["n"]) == ("tiny", "model", 10)
    assert model["tokenmerge"]["speeds"].keys() == BATCHED_SPEEDS.keys()
    assert server.ask("/healthz").data == {"status": "ok", "replicas": 2, "starting": 0}


@pytest.mark.parametrize("speed", BATCHED_SPEEDS)
def test_a_seed_gives_the_same_picture_in_any_batch(server: Server, speed: str) -> None:
    steps = {"speed": speed, "steps": 6}
    (alone,) = server.pictures(prompt="a rose", seed=5, **steps)
    before = server.metric("batch_size_count"), server.metric("batch_size_sum")
    others = [{"prompt": f"a sunflower in rain {number}", "seed": number, **steps} for number in range(7)]
    answers = together(server, [*others[:4], {"prompt": "a rose", "seed": 5, **steps}, *others[4:]])
    found = [pixels(base64.b64decode(answer.data["data"][0]["b64_json"])) for answer in answers]
    assert np.abs(found[4] - alone).max() <= 1
    assert np.abs(found[3] - alone).max() > 8
    batches, drawn = server.metric("batch_size_count") - before[0], server.metric("batch_size_sum") - before[1]
    assert drawn == 8
    shares = server.ask("/v1/models").data["data"][0]["tokenmerge"]["speeds"][speed]["batched"]
    assert batches < 8 if shares else batches == 8


def test_requests_of_other_settings_are_no_batch(server: Server) -> None:
    before = server.metric("batch_size_count"), server.metric("batch_size_sum")
    requests = [{"steps": 3}, {"steps": 4}, {"size": "64x128"}, {"speed": "plain"}, {"speed": "fast"}]
    assert [answer.status for answer in together(server, requests)] == [200] * 5
    assert (server.metric("batch_size_count") - before[0], server.metric("batch_size_sum") - before[1]) == (5, 5)


def test_limits_are_refused_over_http(server: Server) -> None:
    for what, words in REFUSED:
        answer = server.ask("/v1/images/generations", body_of(what))
        assert answer.status == 400, what
        assert words in answer.data["error"]["message"]
        assert answer.data["error"]["type"] == "invalid_request_error"
    assert server.draw(model="another").status == 404
    assert server.ask("/v1/images").status == 404
    assert server.ask("/v1/images/generations").status == 405
    assert server.metric("queue") == 0


def test_keys_are_asked_for(server: Server) -> None:
    for path, body in (("/v1/images/generations", b'{"prompt": "a rose"}'), ("/v1/models", None), ("/metrics", None)):
        for key in (None, "wrong", KEY[:-1]):
            answer = server.ask(path, body, key)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "Authorization: Bearer KEY" in answer.data["error"]["message"]
    assert server.ask("/healthz", key=None).status == 200


def test_a_full_queue_is_told_with_when_to_come_again(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow: Future[Answer] = pool.submit(server.draw, n=10, steps=60)
        server.wait(lambda: server.metric("queue") == 10)
        full = server.draw(n=3)
        assert full.status == 429
        assert 1 <= int(full.headers["Retry-After"]) <= 60
        assert "10 of 12 places are taken, and 3 are needed" in full.data["error"]["message"]
        assert full.data["error"]["type"] == "rate_limit_error"
        assert server.draw(n=2).status == 200
        assert slow.result().status == 200
    assert server.metric("queue") == 0


def test_metrics_have_the_seconds_of_requests(server: Server) -> None:
    before = server.metric("request_seconds_count"), server.metric("request_seconds_sum")
    begun = time.perf_counter()
    assert server.draw(n=2, steps=12).status == 200
    took = time.perf_counter() - begun
    assert server.draw(n=0).status == 400
    assert server.metric("request_seconds_count") == before[0] + 1
    assert 0 < server.metric("request_seconds_sum") - before[1] < took


def test_metrics_have_the_drift_that_hold_estimates(server: Server) -> None:
    before = server.metric("estimated_psnr_count")
    assert server.draw(speed="plain", steps=12).status == 200
    assert server.metric("estimated_psnr_count") == before
    assert server.draw(speed="careful", steps=12).status == 200
    assert server.metric("estimated_psnr_count") == before + 1
    assert server.metric("estimated_psnr_sum") > 0


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    before = server.ask("/metrics").body.decode()
    body = json.dumps({"prompt": SECRET, "size": "128x128", "steps": 60, "n": 10}).encode()
    head = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        server.wait(lambda: server.metric("queue") == 10)
    server.wait(lambda: server.metric("queue") == 0, 5)
    assert 'status="499"' not in before
    assert (
        'tokenmerge_requests_total{route="/v1/images/generations",status="499"} 1.0'
        in server.ask("/metrics").body.decode()
    )
    # The pictures of the client that left are not drawn.
    drawn = server.metric("batch_size_sum")
    assert server.draw(n=10).status == 200
    assert server.metric("batch_size_sum") - drawn == 10


def test_a_killed_replica_is_replaced_and_no_request_is_lost(server: Server) -> None:
    requests = [{"prompt": f"a rose {number}", "seed": number, "steps": 60} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.draw, **fields) for fields in requests]
        server.wait(lambda: server.metric("queue") == 8)
        time.sleep(0.2)
        first, _ = server.replicas("Worker")
        first.kill()
        assert [each.result().status for each in asked] == [200] * 8
    assert server.metric("redrawn_total") >= 1
    assert server.draw().status == 200
    server.wait(lambda: len({*server.replicas("Worker")} - {first}) == 2)
    server.wait(lambda: server.ask("/healthz").data["replicas"] == 2)
    assert server.draw(n=10).status == 200


def test_a_killed_front_is_replaced_and_no_request_hangs(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.draw, n=10, steps=60)
        server.wait(lambda: server.metric("queue") == 10)
        (front,) = server.replicas("Front")
        front.kill()
        failed = asked.result(30)
    assert (failed.status, failed.data["error"]["type"]) == (503, "server_error")
    assert int(failed.headers["Retry-After"]) >= 1
    # A health check does not wait for the new front, which takes longer to start.
    begun = time.monotonic()
    assert server.ask("/healthz", key=None).status in (200, 503)
    assert time.monotonic() - begun < 4
    # Other requests wait for the new front.
    assert server.draw().status == 200
    assert server.ask("/healthz").data["replicas"] == 2
    assert server.replicas("Front") != [front]


def listening() -> dict[int, str]:
    """Listening addresses and ports by socket inode, in the hexadecimal form and byte order of /proc."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found[int(words[9])] = words[1]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_listener_but_that_for_clients_is_on_loopback(server: Server) -> None:
    addresses, found = listening(), []
    for process in server.family:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:[") and int(target[8:-1]) in addresses:
                found.append((process.name(), addresses[int(target[8:-1])]))
    # Ray's own listeners are seen too.
    assert len(found) > 8
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    beyond = [(name, address) for name, address in found if address.partition(":")[0] not in loopback]
    assert beyond == [("ray::ProxyActor", f"00000000:{server.port:04X}")]


def test_no_prompt_is_in_logs_or_metrics(server: Server) -> None:
    long = f"{SECRET} " * 20  # longer than the text encoder takes, about which diffusers warns
    assert server.draw(prompt=long).status == 200
    assert server.ask(f"/v1/images/generations?prompt={SECRET}", b'{"prompt": 1}').status == 400
    assert server.ask(f"/{SECRET}").status == 404
    server.draw(prompt=SECRET, speed=SECRET)
    files = [path for path in server.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len([path for path in files if "Worker" in path.name]) >= 2
    for path in [*files, server.output]:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in server.ask("/metrics").body.decode()


# Another program that joins the server's Ray cluster and tries to serve there.
GUEST = """
import sys
from tokenmerge.errors import TokenMergeError
from tokenmerge.tools.serving.offer import Serving
from tokenmerge.tools.serving.run import application, run_server

address, model = sys.argv[1:]
try:
    run_server(Serving(model=model, device="cpu", cluster=address))
except TokenMergeError as error:
    print(error)

import ray
from ray import serve

ray.init(address, log_to_driver=False, logging_level="ERROR")
try:
    serve.run(application({"model": model, "device": "cpu", "timeout": 1}), name="guest", route_prefix="/guest")
except RuntimeError:
    print(serve.status().applications["guest"].deployments["Front"].message)
serve.delete("guest")
"""


def test_a_cluster_that_already_serves_keeps_its_address_and_needs_keys(server: Server, model: Path) -> None:
    raylet = next(each for each in server.family if each.name() == "raylet")
    (address,) = (each.partition("=")[2] for each in raylet.cmdline() if each.startswith("--gcs-address="))
    # Ray's settings include the cluster's token.
    rays = {name: value for name, value in raylet.environ().items() if name.startswith("RAY_")}
    guest = subprocess.run(
        [sys.executable, "-c", GUEST, address, str(model)],
        env={**os.environ, **rays, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    first, *_, last = guest.stdout.strip().splitlines()
    assert guest.returncode == 0
    assert first == (
        f"the cluster already serves at 0.0.0.0 port {server.port}, not at 127.0.0.1 port 8000; "
        f"use --host 0.0.0.0 --port {server.port}, or end what runs there with `serve shutdown`"
    )
    assert f"the cluster serves at 0.0.0.0 port {server.port}, where anybody may draw without a key" in last
    assert server.draw().status == 200


def test_an_interrupt_answers_what_is_drawn_and_refuses_the_rest(server: Server) -> None:
    """Must run last: it ends the server."""
    told = server.output.read_text()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.draw, n=10, steps=60, size="128x128")
        server.wait(lambda: server.metric("queue") == 10)
        server.interrupt()
        server.wait(lambda: server.ask("/healthz").status == 503)
        late = server.draw()
        assert not asked.done()
        assert (late.status, late.data["error"]["type"]) == (503, "server_error")
        assert int(late.headers["Retry-After"]) >= 1
        assert asked.result().status == 200
    server.wait(lambda: server.output.read_text().endswith("tokenmerge: interrupted\n"))
    # Ray prints nothing about the processes it has killed.
    told += "finishing accepted requests; press Ctrl-C again to stop without waiting\n"
    assert server.output.read_text() == f"{told}tokenmerge: interrupted\n"
