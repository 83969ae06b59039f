"""A real ComfyUI server in its own process, and workflows to send to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
NODES = TESTS.parent / "comfyui"
# Nodes by name: their class and inputs. A link is the other node's name, and the number of its output.
Workflow = dict[str, tuple[str, dict[str, Any]]]


class Failed(RuntimeError):
    """A workflow was refused, or ended with an error."""


class Server:
    """A server with this repository's nodes and the tests' loaders."""

    def __init__(self, python: str | Path, base: Path, *, cache: bool = False, timeout: float = 180.0) -> None:
        self.base = base
        nodes = base / "custom_nodes"
        for folder in (nodes, base / "models" / "loras", base / "input", base / "output"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, target in (("tokenmerge", NODES), ("tokenmerge_tests", TESTS / "loaders")):
            if not (nodes / name).exists():
                (nodes / name).symlink_to(target)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = base / "server.log"
        command = [str(python), str(TESTS / "launch.py"), "--cpu", "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(base), "--disable-api-nodes", "--disable-auto-launch"]
        command += ["--database-url", f"sqlite:///{base / 'comfyui.db'}"]
        # With a cache, a workflow that ran before would not run again.
        command += [] if cache else ["--cache-none"]
        # One thread keeps pictures equal to the bit, and spares a busy machine threads that wait.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        ends = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.close()
                raise Failed(f"ComfyUI did not start:\n{self.log()[-4000:]}")
            time.sleep(0.25)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def usual(self, node: str, **changes: Any) -> tuple[str, dict[str, Any]]:
        """A node with the default values of its widgets, apart from `changes`."""
        required = self.get(f"/object_info/{node}")[node]["input"]["required"]
        widgets = {name: told[1]["default"] for name, told in required.items() if "default" in (told[1:] or [{}])[0]}
        return node, {**widgets, **changes}

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text = answer.read().decode()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            raise Failed(error.read().decode()) from error

    def queue(self, workflow: Workflow) -> str:
        """Send a workflow and return its number."""
        prompt = {name: {"class_type": kind, "inputs": _linked(inputs)} for name, (kind, inputs) in workflow.items()}
        return str(self.post("/prompt", {"prompt": prompt})["prompt_id"])

    def wait(self, number: str, timeout: float = 300.0) -> dict[str, Any]:
        """The history of a workflow that has ended."""
        ends = time.monotonic() + timeout
        while time.monotonic() < ends:
            history = self.get(f"/history/{number}")
            if number in history:
                return dict(history[number])
            time.sleep(0.05)
        raise Failed(f"no answer in {timeout:g} s:\n{self.log()[-4000:]}")

    def run(self, workflow: Workflow) -> dict[str, Path]:
        """Run a workflow to its end, and return the latents that it saved, by the name of the node."""
        history = self.wait(self.queue(workflow))
        if history["status"]["status_str"] != "success":
            failed = [told for kind, told in history["status"]["messages"] if kind == "execution_error"]
            raise Failed(failed[0]["exception_message"] if failed else json.dumps(history["status"]))
        return {
            name: self.base / "output" / file["subfolder"] / file["filename"]
            for name, told in history["outputs"].items()
            for file in told.get("latents", ())
        }

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True


def _linked(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with links as ComfyUI writes them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in inputs.items()}


def sampled(
    loader: tuple[str, dict[str, Any]],
    *patches: tuple[str, dict[str, Any]],
    control: dict[str, Any] | None = None,
    start: str | None = None,
    left: bool = False,
    **sampling: Any,
) -> Workflow:
    """A workflow that samples once: a loader, nodes that change its MODEL one after the other, a KSampler.

    control: a ControlNet loader's inputs. start: a latent in the input folder to start from. left: draw only its left
    half.
    """
    workflow: Workflow = {"load": loader}
    model: tuple[str, int] = ("load", 0)
    for number, (kind, inputs) in enumerate(patches):
        workflow[f"patch{number}"] = (kind, {"model": model, **inputs})
        model = (f"patch{number}", 0)
    positive, negative = ("load", 1), ("load", 2)
    if control is not None:
        workflow["control"] = ("TestControlNet", {"model": ("load", 0), **control})
        applied = {"control_net": ("control", 0), "image": ("control", 1), "strength": 1.0}
        applied |= {"positive": positive, "negative": negative, "start_percent": 0.0, "end_percent": 1.0}
        workflow["controlled"] = ("ControlNetApplyAdvanced", applied)
        positive, negative = ("controlled", 0), ("controlled", 1)
    latent = ("load", 3)
    if start is not None:
        workflow["start"] = ("LoadLatent", {"latent": start})
        latent = ("start", 0)
    if left:
        workflow["nothing"] = ("SolidMask", {"value": 0.0, "width": 64, "height": 64})
        workflow["something"] = ("SolidMask", {"value": 1.0, "width": 32, "height": 64})
        both = {"destination": ("nothing", 0), "source": ("something", 0), "x": 0, "y": 0, "operation": "add"}
        workflow["mask"] = ("MaskComposite", both)
        workflow["masked"] = ("SetLatentNoiseMask", {"samples": latent, "mask": ("mask", 0)})
        latent = ("masked", 0)
    usual = {"seed": 0, "steps": 12, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    workflow["sample"] = ("KSampler", {**usual, **sampling, **links})
    workflow["save"] = ("SaveLatent", {"samples": ("sample", 0), "filename_prefix": "latent"})
    return workflow
