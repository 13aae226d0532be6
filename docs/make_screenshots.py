"""Takes the pictures of the page in docs/img: serves a model, lets a few clients ask, looks with headless Chromium.

    python docs/make_screenshots.py [MODEL] [--ram SIZE]

MODEL is what `sluice serve` takes; the default is the demo model in a budget that makes it read from disk.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import chromium  # noqa: E402

WIDTH, HEIGHT = 1440, 980
MAX_BYTES = 300_000
QUESTION = "Why does ice float on water? Answer in three sentences."
OTHERS = (
    "Tell a long story about a lighthouse keeper and the sea.",
    "Explain to a child, in detail, how bread is made.",
    "Describe a walk through an old town in autumn.",
)


def ask(url: str, text: str) -> None:
    """A client that wants a long answer and doesn't look at it."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 800, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with suppress(OSError), urllib.request.urlopen(request) as answer:  # it ends before it is done
        answer.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--ram", default="460M")
    arguments = parser.parse_args()
    if chromium.find() is None:
        print("there is no Chromium: apt install chromium", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "sluice", "serve", arguments.model, "--ram", arguments.ram, "--port", "0"]
    command += ["--ctx", "1024", "--max-streams", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            found = re.search(r"http://\S+", said)
            if found is None:
                print(f"the server did not start: {said}", file=sys.stderr)
                return 1
            take(found[0])
        finally:
            server.terminate()
    return 0


def take(url: str) -> None:
    with chromium.open_page() as page:
        page.dress(width=WIDTH, height=HEIGHT)
        page.go(url)
        page.wait("document.querySelector('#link').dataset.state === 'live'")
        for text in OTHERS:
            threading.Thread(target=ask, args=(url, text), daemon=True).start()
        page.wait("document.querySelectorAll('.request').length === 3", 120)
        page.evaluate("new Promise(done => setTimeout(done, 40000))")
        page.evaluate("document.querySelector('#set-max').value = 160")
        page.type(QUESTION)
        page.press("Enter")
        page.wait("document.querySelector('.message.assistant .body').textContent.length > 250", 120)
        folder = HERE / "img"
        folder.mkdir(exist_ok=True)
        for name, dark in (("light", False), ("dark", True)):
            path = folder / f"serve-{name}.png"
            page.look(path, width=WIDTH, height=HEIGHT, dark=dark)
            size = path.stat().st_size
            print(f"{path}: {size / 1000:.0f} kB")
            if size > MAX_BYTES:
                raise SystemExit(f"{path} is larger than {MAX_BYTES} bytes: look at less at a time")


if __name__ == "__main__":
    sys.exit(main())
