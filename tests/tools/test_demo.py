"""`tokenmerge demo` as people and programs use it: a real server, a real browser, real pictures."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from gradio_client import Client
from PIL import Image, ImageChops
from playwright.sync_api import Browser, Page, expect, sync_playwright

from saved import save_sdxl
from tokenmerge import Hold, Merge, TokenMergeError, presets
from tokenmerge.config import Techniques
from tokenmerge.tools.demo.code import written
from tokenmerge.tools.demo.models import Models
from tokenmerge.tools.demo.orders import MOST_STEPS, as_typed, fields_of, label_of, read_technique
from tokenmerge.tools.demo.serving import served
from tokenmerge.tools.fields import write_value
from tokenmerge.tools.speeds import SPEEDS
from tokenmerge.tools.typed import read_typed

MODEL = "tiny-sdxl"
# The name of a model folder that the server offers.
OWN = "mine"
WIDTHS = (1400, 1000, 800, 390)
TABS = ["Compare", "Drift", "Merged", "Summary", "Python"]
# Arguments of the endpoint, in its order.
SMALL = {"prompt": "a rose", "technique": "balanced", "model": MODEL, "seed": 3, "steps": 4, "size": "64x64"}
PATIENCE = 60
expect.set_options(timeout=PATIENCE * 1000)


@dataclass(frozen=True)
class Site:
    """The page under test, and the models behind it."""

    address: str
    models: Models

    @property
    def is_free(self) -> bool:
        """Whether no technique is applied to the model."""
        return "_tokenmerge" not in vars(self.models.studio(MODEL).pipe.unet)

    def request(self, path: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
        """Status and body of the answer."""
        asked = urllib.request.Request(f"{self.address}{path}", data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def begin(self, **values: Any) -> str:
        """Call the endpoint; returns the id of the event."""
        data = json.dumps({"data": list((SMALL | values).values())}).encode()
        status, text = self.request("gradio_api/call/draw", data, **{"Content-Type": "application/json"})
        assert status == 200, text
        return str(json.loads(text)["event_id"])

    def call(self, **values: Any) -> list[tuple[str, Any]]:
        """Events of one call of the endpoint."""
        _, text = self.request(f"gradio_api/call/draw/{self.begin(**values)}")
        lines = [event.split("\n") for event in text.strip().split("\n\n")]
        return [(name.removeprefix("event: "), json.loads(told.removeprefix("data: "))) for name, told in lines]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = save_sdxl(tmp_path_factory.mktemp("models") / OWN)
    models = Models([MODEL, str(folder)], device="cpu")
    with served(models, "127.0.0.1", free_port()) as address:
        yield Site(address, models)


def find_browser() -> str | None:
    """The browser that `make test` installs, or the system's."""
    places = (str(Path(sys.prefix) / "chromium" / "chromium"), "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, places)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_browser()
    if chromium is None:
        # Nobody notices a skipped test in CI.
        report = pytest.fail if os.environ.get("CI") else pytest.skip
        report("there is no browser to look with: make test brings one by npm, or install chromium")
    with sync_playwright() as playwright:
        # Chromium has no sandbox for root, the usual user in containers.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass(frozen=True)
class Box:
    """The place of an element on a page, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: Box) -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height


@dataclass
class Visit:
    """A visitor's tab and the problems seen in it."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def fill(self, steps: int = 4, size: str = "64x64", prompt: str = "a rose") -> None:
        self.page.fill("#tm-prompt textarea", prompt)
        self.page.fill("#tm-steps input", str(steps))
        self.page.fill("#tm-size input", size)
        self.page.keyboard.press("Tab")

    def draw(self) -> None:
        self.page.click("#tm-draw")

    def show(self, tab: str) -> None:
        self.page.get_by_role("tab", name=tab, exact=True).click()

    def box(self, selector: str) -> Box:
        box = self.page.locator(selector).first.bounding_box()
        assert box is not None, f"{selector} is not shown"
        return Box(**box)

    def color(self, selector: str) -> str:
        return str(self.page.locator(selector).first.evaluate("each => getComputedStyle(each).backgroundColor"))


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    yield from visiting(browser, site)


@pytest.fixture
def other(browser: Browser, site: Site) -> Iterator[Visit]:
    yield from visiting(browser, site)


def visiting(browser: Browser, site: Site) -> Iterator[Visit]:
    """A tab that must log no error and send no request to another server."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    visit = Visit(page)
    page.on("console", lambda told: visit.problems.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda error: visit.problems.append(str(error)))
    page.on("request", lambda asked: visit.problems.append(asked.url) if is_outside(asked.url, site) else None)
    page.goto(site.address)
    page.wait_for_selector("#tm-draw")
    yield visit
    context.close()
    assert visit.problems == []


def is_outside(url: str, site: Site) -> bool:
    return not url.startswith((site.address, "data:", "blob:"))


def test_a_picture_is_made_and_the_slider_moves(visit: Visit, site: Site) -> None:
    page = visit.page
    visit.fill(steps=12)
    visit.draw()
    page.wait_for_selector("#tm-figures dl")
    strips = page.locator("#tm-status [role=progressbar]")
    assert [strip.get_attribute("aria-valuenow") for strip in strips.all()] == ["12", "12"]
    assert page.locator("#tm-status .tm-cells i.tm-held").count() >= 1
    told = page.inner_text("#tm-figures")
    for word in ("plain", "balanced", "speed-up", "MSE", "PSNR"):
        assert word in told
    estimate = page.inner_text("#tm-figures div:has(> dt:text-is('estimated PSNR')) dd")
    assert re.fullmatch(r"\d+ dB", estimate)
    pictures = page.locator("#tm-slider img")
    expect(pictures).to_have_count(2)
    assert [picture.evaluate("image => image.naturalWidth") for picture in pictures.all()] == [64, 64]
    handle = "#tm-slider [role=slider], #tm-slider .outer"
    before, slider = visit.box(handle), visit.box("#tm-slider")
    page.mouse.move(before.x + before.width / 2, before.y + before.height / 2)
    page.mouse.down()
    page.mouse.move(slider.x + slider.width * 0.2, before.y + before.height / 2, steps=5)
    page.mouse.up()
    assert visit.box(handle).x < before.x - 0.2 * slider.width
    visit.show("Summary")
    expect(page.locator("#tm-summary")).to_contain_text(f"Estimated PSNR to the plain image: {estimate}")
    assert site.is_free


def test_the_gallery_keeps_pictures_and_details_have_every_field(visit: Visit, site: Site) -> None:
    page = visit.page
    visit.fill()
    visit.draw()
    expect(page.locator("#tm-gallery button img")).to_have_count(1)
    page.click("#tm-speed label:has-text('fastest')")
    page.click("#tm-details button")
    for kind in (Hold, Merge):
        visit.show(kind.__name__)
        technique = getattr(SPEEDS["fastest"], kind.NAME) or kind()
        for name in fields_of(kind):
            box = page.locator(f"#tm-{kind.NAME}-{name}")
            expect(box).to_contain_text(kind.field_docs()[name])
            expect(box.locator("textarea")).to_have_value(write_value(getattr(technique, name)))
    page.check("#tm-merge input")
    # The technique no longer matches a named speed, so none stays checked.
    expect(page.locator("#tm-speed input:checked")).to_have_count(0)
    visit.draw()
    expect(page.locator("#tm-gallery button img")).to_have_count(2)
    visit.show("Merged")
    expect(page.locator("#tm-merged img")).to_be_visible()
    # As large as under the slider, although the picture is only 64 pixels wide.
    assert visit.box("#tm-merged img").width > 600
    visit.show("Drift")
    assert visit.box("#tm-drift img").width > 600
    visit.show("Python")
    expect(page.locator("#tm-python .cm-content")).to_contain_text("Merge()")
    # Go back to the first picture.
    page.locator("#tm-gallery button").nth(1).click()
    expect(page.locator("#tm-python .cm-content")).not_to_contain_text("Merge()")
    assert site.is_free


def test_wrong_input_shows_a_sentence(visit: Visit) -> None:
    # Open the details early: boxes that have just been opened take no text yet.
    visit.page.click("#tm-details button")
    for wrong, sentence in (
        ({"prompt": " "}, "The prompt is empty; write what to draw."),
        ({"steps": 0}, f"The number of steps is 0; it must be a whole number from 1 to {MOST_STEPS}."),
        ({"size": "100x64"}, "100x64 pixels cannot be drawn"),
        ({"size": "<b>huge</b>"}, "'<b>huge</b>' is not a size; write width x height in pixels, as in 512x384."),
    ):
        visit.fill(**wrong)
        visit.draw()
        expect(visit.page.locator("[role=alert]")).to_contain_text(sentence)
    visit.fill()
    visit.page.fill("#tm-hold-every textarea", "often")
    visit.draw()
    expect(visit.page.locator("[role=alert]")).to_contain_text("Hold's every: 'often' is not a whole number, as in 3.")
    assert "Traceback" not in visit.page.content()
    assert not re.search(r"\w+Error\b", visit.page.inner_text("body"))
    # The error disappears once the value is right.
    visit.page.fill("#tm-hold-every textarea", "none")
    visit.draw()
    visit.page.wait_for_selector("#tm-figures dl")
    expect(visit.page.locator("[role=alert]")).to_have_count(0)
    # After an error the last picture is hidden, so that it does not look like the answer. The gallery keeps it.
    visit.fill(size="100x64")
    visit.draw()
    expect(visit.page.locator("[role=alert]")).to_have_count(1)
    expect(visit.page.locator("#tm-figures dl")).to_have_count(0)
    parts = {"Compare": "#tm-slider img", "Drift": "#tm-drift img", "Summary": "#tm-summary pre", "Python": ".cm-line"}
    for tab, part in parts.items():
        visit.show(tab)
        expect(visit.page.locator(part)).to_have_count(0)
    visit.page.locator("#tm-gallery button").first.click()
    expect(visit.page.locator("[role=alert]")).to_have_count(0)
    for tab, part in parts.items():
        visit.show(tab)
        expect(visit.page.locator(part).first).to_be_visible()


def test_python_is_copied_as_it_runs_and_a_folder_is_drawn(
    visit: Visit, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#tm-model input")
    page.get_by_role("option", name=OWN).click()
    # The model's own number of steps.
    expect(page.locator("#tm-steps input")).to_have_value("30")
    visit.fill()
    visit.draw()
    page.wait_for_selector("#tm-figures dl")
    shown = page.request.get(str(page.locator("#tm-slider img").nth(1).get_attribute("src"))).body()
    visit.show("Python")
    page.click("#tm-python button[aria-label=Copy]")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert OWN in copied
    monkeypatch.chdir(tmp_path)
    exec(copied, {})
    drawn = Image.open(tmp_path / "picture.png")
    assert drawn.size == (64, 64)
    assert ImageChops.difference(drawn, Image.open(io.BytesIO(shown))).getbbox() is None


def test_a_second_visitor_waits_until_the_first_stops(visit: Visit, other: Visit, site: Site) -> None:
    for each in (visit, other):
        each.page.set_viewport_size({"width": min(WIDTHS), "height": 850})
    visit.fill(steps=MOST_STEPS, size="256x256")
    visit.draw()
    # The step cells are visible even at the largest number of steps.
    visit.page.wait_for_selector("#tm-status .tm-cells i.tm-full")
    other.fill()
    other.draw()
    expect(other.page.locator("#tm-status")).to_contain_text("queue: 1/1")
    assert not other.box("#tm-status .progress-text").overlaps(other.box("#tm-status .wrap svg"))
    # A waiting visitor may leave the queue and return.
    other.page.click("#tm-stop")
    expect(other.page.locator("#tm-status")).to_contain_text("Stopped")
    other.draw()
    expect(other.page.locator("#tm-status")).to_contain_text("queue: 1/1")
    visit.page.click("#tm-stop")
    expect(visit.page.locator("#tm-status")).to_contain_text("Stopped. The model is free")
    other.page.wait_for_selector("#tm-figures dl")
    assert site.is_free


def test_who_closes_the_tab_frees_the_model(browser: Browser, site: Site) -> None:
    visit = next(visiting(browser, site))
    visit.fill(steps=MOST_STEPS, size="256x256")
    visit.draw()
    visit.page.wait_for_selector("#tm-status .tm-cells i.tm-full")
    visit.page.close()
    assert_free_soon(site)


def test_a_program_that_hangs_up_frees_the_model(site: Site) -> None:
    event = site.begin(steps=MOST_STEPS, size="256x256")
    with urllib.request.urlopen(f"{site.address}gradio_api/call/draw/{event}", timeout=PATIENCE) as stream:
        while '"steps": 1' not in stream.readline().decode():
            continue
    assert_free_soon(site)


def assert_free_soon(site: Site) -> None:
    """Another visitor's picture arrives long before the abandoned one could have been finished."""
    begin = time.monotonic()
    assert site.call()[-1][0] == "complete"
    assert time.monotonic() - begin < 30
    assert site.is_free


def test_the_page_fits_any_screen_and_the_legend_its_steps(visit: Visit) -> None:
    page = visit.page
    visit.fill(steps=12)
    visit.draw()
    page.wait_for_selector("#tm-figures dl")
    figures, tabs = page.locator("#tm-figures dl > div"), page.locator("#tm-tabs [role=tab]")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1000})
        # Scripts measure the page only after a delay.
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert tabs.all_inner_texts() == TABS
        assert len({tab.bounding_box()["y"] for tab in tabs.all()}) == 1  # type: ignore[index]
        cut = "each => each.scrollWidth > each.clientWidth"
        assert not [
            told.inner_text() for told in page.locator("#tm-figures dt, .tm-strip *").all() if told.evaluate(cut)
        ]
        rows = Counter(figure.bounding_box()["y"] for figure in figures.all())  # type: ignore[index]
        assert rows.total() >= 7
        # No figure is alone in its row, unless the screen is too narrow for two columns.
        assert width < 800 or min(rows.values()) > 1
        assert width < max(WIDTHS) or len(rows) == 1
    # The picture lies between the button and the seed.
    tops = [visit.box(name).y for name in ("#tm-draw", "#tm-slider", "#tm-seed")]
    assert tops == sorted(tops)
    visit.show("Summary")
    assert not page.locator("#tm-summary .tm-text").evaluate(cut)
    colors = []
    for theme in ("light", "dark"):
        page.evaluate("theme => document.body.classList.toggle('dark', theme == 'dark')", theme)
        colors.append(visit.color(".tm-cells .tm-full"))
        for kind in ("full", "held"):
            assert visit.color(f".tm-legend .tm-{kind}") == visit.color(f".tm-cells .tm-{kind}")
    # The dark theme has its own colour for full steps.
    assert colors[0] != colors[1]


def test_the_endpoint_draws_and_its_python_runs_as_pasted(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = site.call(technique="unet:ratio=0.25 + hold:every=2,start=0")
    told = [data[0] for name, data in events if name == "generating"]
    assert {"done", "doing", "plain", "fast"} <= told[0].keys()
    assert max(each["plain"]["steps"] for each in told if not each["done"]) == 4
    name, (result,) = events[-1]
    assert name == "complete"
    fast = Image.open(io.BytesIO(base64.b64decode(result["fast"]["png"])))
    plain = Image.open(io.BytesIO(base64.b64decode(result["plain"]["png"])))
    assert fast.size == plain.size == (64, 64)
    assert result["fast"]["mse"] > 0
    assert result["fast"]["kinds"] == {"merged": 3, "held": 1}
    assert "3 merged, 1 held" in result["summary"]
    monkeypatch.chdir(tmp_path)
    exec(result["python"], {})
    assert "3 merged, 1 held" in capsys.readouterr().out
    drawn = Image.open(tmp_path / "picture.png")
    assert ImageChops.difference(drawn, fast).getbbox() is None


def test_the_same_picture_is_the_same(site: Site) -> None:
    result = Client(site.address, verbose=False).predict(*(SMALL | {"technique": "plain"}).values(), api_name="/draw")
    assert result["fast"]["png"] == result["plain"]["png"]
    assert result["fast"]["psnr"] == "inf"
    assert "tokenmerge.apply" not in result["python"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"model": "/etc"}, f"There is no model '/etc' here; choose from {MODEL}"),
        ({"model": "tiny-flux"}, "There is no model 'tiny-flux' here"),
        ({"model": None}, "There is no model None here"),
        ({"prompt": 7}, "The prompt is empty"),
        ({"prompt": "rose " * 300}, "The prompt has 1499 characters; the limit is 1000"),
        ({"steps": 10**6}, "The number of steps is 1e+06; it must be a whole number from 1 to 200"),
        ({"steps": 2.5}, "The number of steps is 2.5"),
        ({"steps": "many"}, "The number of steps is missing"),
        ({"seed": -1}, "The seed is -1; it must be a whole number from 0 to 4294967295"),
        ({"size": "4096x4096"}, "4096x4096 is too large for this page; the limit is 4 times the pixels of 256x256"),
        ({"size": None}, "'None' is not a size"),
        ({"technique": "fats"}, "'fats' is neither a speed nor a preset (did you mean 'fast'?)"),
        ({"technique": ""}, "The technique is empty; use plain, careful"),
        ({"technique": "hold:every=0"}, "every is 0"),
        ({"technique": "hold:what=everything"}, "choose from auto, blocks, stages"),
        ({"technique": "toma:levels=16"}, "levels"),
        ({"technique": "none + mag"}, "'mag' is neither a speed nor a preset"),
        ({"technique": "hold:every=2\t+\t/etc/hostname.yaml"}, "'/etc/hostname.yaml' is neither a speed nor a preset"),
        ({"technique": "unet:lora=/etc/hostname"}, "lora names a file on the server, which visitors may not do"),
        ({"technique": "mine@./pyproject.json"}, "is neither a speed nor a preset"),
    ],
)
def test_the_endpoint_refuses_with_a_sentence(site: Site, wrong: dict[str, Any], sentence: str) -> None:
    name, told = site.call(**wrong)[-1]
    assert name == "error"
    assert sentence in told["error"]
    assert "Traceback" not in str(told)
    assert site.is_free


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("gradio_api/file=/etc/passwd", 403),
        ("gradio_api/file=../../../../etc/passwd", 403),
        (f"gradio_api/file={Path(__file__).resolve()}", 403),
        ("file=/etc/passwd", 404),
        ("gradio_api/file/etc/passwd", 404),
        ("gradio_api/file=https://example.com/", 404),
        ("gradio_api/proxy=https://example.com/", 404),
        ("gradio_api/upload", 404),
        ("gradio_api/run/draw", 404),
        ("monitoring", 404),
        ("docs", 404),
        ("", 200),
    ],
)
def test_no_file_of_the_machine_is_served_and_nothing_fetched(site: Site, path: str, status: int) -> None:
    answered, text = site.request(path)
    assert answered == status
    assert "root:" not in text


def test_uploads_and_foreign_names_are_refused(site: Site) -> None:
    assert site.request("gradio_api/upload", b"x")[0] == 404
    assert site.request("", Host="somebody.example")[0] == 400


# The command in a process that blocks and reports connections to other machines.
GUARDED = """
import signal, socket, sys
# A shell's background jobs, and what they start, are deaf to interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
connect = socket.socket.connect
def guarded(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1"):
        print("OUTSIDE", address, file=sys.stderr)
        raise OSError("not from here")
    return connect(self, address)
socket.socket.connect = guarded
from tokenmerge.tools.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_serves_until_it_is_interrupted_and_asks_nobody() -> None:
    command = [sys.executable, "-c", GUARDED, "demo", "--models", MODEL, "--port", str(free_port()), "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            address = process.stdout.readline().split()[2]
            # By default only this machine can connect.
            assert address.startswith("http://127.0.0.1:")
            listening = psutil.Process(process.pid).net_connections("inet")
            assert {each.laddr.ip for each in listening if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
            with urllib.request.urlopen(f"{address}config", timeout=PATIENCE) as answer:
                assert "tokenmerge" in answer.read().decode()
            process.send_signal(signal.SIGINT)
            _, printed = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 130
    assert printed.endswith("tokenmerge: interrupted\n")
    assert "Traceback" not in printed
    assert "OUTSIDE" not in printed


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenmerge.tools.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} is not available (Address already in use); give another" in capsys.readouterr().err
    assert main(["demo", "--port", "70000"]) == 2
    assert "--port: 70000 is out of range; it must be from 1 to 65535" in capsys.readouterr().err


def test_only_safetensors_are_loaded_and_no_code_beside_a_model_runs(tmp_path: Path) -> None:
    folder = save_sdxl(tmp_path / "mine")
    models = Models([str(folder)], device="cpu")
    assert models.names == ("mine",)
    assert models.load("mine").is_loaded
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(TokenMergeError, match="cannot be loaded"):
        Models([str(folder)], device="cpu").load("mine")
    weights.with_suffix(".bin").rename(weights)
    index = json.loads((folder / "model_index.json").read_text())
    refused: list[tuple[Any, str]] = [
        ("MyPipeline", "is a MyPipeline, which is not a diffusers pipeline"),
        # The entry of hub pipelines with their own code, whatever the name of their class.
        (["code", "FluxPipeline"], "is a code.FluxPipeline, which is not a diffusers pipeline"),
        ("WanPipeline", "makes videos"),
    ]
    for name, words in refused:
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": name}))
        with pytest.raises(TokenMergeError, match=words):
            Models([str(folder)], device="cpu")
    ran = tmp_path / "ran"
    for place in (folder, folder / "scheduler"):
        (place / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine:\n    from_pretrained = print\n")
    (folder / "model_index.json").write_text(json.dumps({**index, "scheduler": ["evil", "Mine"]}))
    with pytest.raises(TokenMergeError, match=r"cannot be loaded \(.*custom code in evil.py"):
        Models([str(folder)], device="cpu").load("mine")
    assert not ran.exists()


def test_one_model_is_in_memory_at_a_time_and_two_of_a_name_are_refused(tmp_path: Path) -> None:
    first, second = save_sdxl(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(first, second)
    models = Models([str(first), str(second)], device="cpu")
    models.load("a")
    models.load("b")
    assert [models.studio(name).is_loaded for name in models.names] == [False, True]
    with pytest.raises(TokenMergeError, match="two models are called 'a'"):
        Models([str(first), str(first)], device="cpu")


@pytest.mark.parametrize(
    "techniques",
    [
        *SPEEDS.values(),
        *(Techniques.of(preset) for preset in presets().values()),
        Techniques(Merge(ratio=0.3, levels=(2, 4), merge_regions="whole"), Hold(every=7)),
    ],
    ids=lambda techniques: as_typed(techniques),
)
def test_techniques_are_told_in_words_that_can_be_read_again(techniques: Techniques) -> None:
    assert read_typed(as_typed(techniques)).configuration.techniques == techniques
    assert read_technique(label_of(techniques)).techniques == techniques
    for technique in techniques:
        assert technique is None or eval(written(technique), {"Merge": Merge, "Hold": Hold}) == technique
