"""Drives headless Chromium over its DevTools pipe, for tests of the page and its screenshots. Needs no package.

`find()` says where a Chromium is, `open_page` starts one with an empty profile and no network of its own, and gives
a Page: evaluate JavaScript, type, press keys, look.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--mute-audio", "--disable-default-apps", "--disable-extensions",
    "--no-default-browser-check", "--force-color-profile=srgb",
)  # fmt: skip
ANSWER_S = 60.0
KEYS = {
    "Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36,
    "End": 35,
}  # fmt: skip
SHIFT = 8


def find() -> str | None:
    """The path of a Chromium; None where there is none, or none that can be driven so (Windows)."""
    if not hasattr(os, "posix_spawn"):
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `errors` are what its console complained of, uncaught exceptions and violations of its policy too."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._in, self._out = incoming, outgoing
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command; its result. Raises RuntimeError with what the browser says against it."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        raw = json.dumps(message).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._out, raw) :]
        until = time.monotonic() + ANSWER_S
        while (answer := self._receive(until)).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {ANSWER_S:g} s")
            if not (more := os.read(self._in, 1 << 16)):
                raise RuntimeError("Chromium ended")
            self._rest += more
        raw, _, self._rest = self._rest.partition(b"\0")
        return json.loads(raw)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                detail = params["exceptionDetails"]
                self.errors.append(detail.get("exception", {}).get("description") or detail["text"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, a promise's when it is kept. Raises RuntimeError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["result"].get("description", "an exception"))
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60.0) -> None:
        """Until JavaScript is true, or finds something. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while not self.evaluate(f"!!({expression})"):
            if time.monotonic() > until:
                raise TimeoutError(f"not true after {timeout_s:g} s: {expression}; console: {self.errors[:3]}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """A click in the middle of what `selector` finds."""
        found = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        self.point(*found)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Text for whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key of KEYS."""
        more = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": SHIFT if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **more, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def look(
        self, path: Path | None = None, *, width: int, height: int, dark: bool = False, scale: float = 1.0,
        mobile: bool = False,
    ) -> bytes:  # fmt: skip
        """A screenshot as PNG, written to `path` if given; the page keeps that size and those colours."""
        self.dress(width=width, height=height, dark=dark, scale=scale, mobile=mobile)
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")
        png = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        if path is not None:
            path.write_bytes(png)
        return png

    def dress(
        self, *, width: int, height: int, dark: bool = False, scale: float = 1.0, mobile: bool = False,
        reduced_motion: bool = False,
    ) -> None:  # fmt: skip
        """Give the page a size, a device's pixels, and what the system would tell it of its owner's taste."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)


@contextmanager
def open_page(flags: Sequence[str] = ()) -> Iterator[Page]:
    """A Chromium of its own with one tab, ended with the block."""
    import fcntl

    program = find()
    assert program is not None, "there is no Chromium: ask find() first"
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # the browser reads from descriptor 3 and writes to 4: ours must lie above before they are moved there
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate((null, null, null, *moved))]
        pid = os.posix_spawn(program, command, {**os.environ, "HOME": profile}, file_actions=actions, setpgroup=0)
        for fd in (*moved, null, theirs_in, theirs_out):
            os.close(fd)
        try:
            yield Page(ours_in, ours_out)
        finally:
            for fd in (ours_in, ours_out):
                os.close(fd)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
