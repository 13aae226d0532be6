"""The page: what it is served with, and what a person does with it in headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from tiny import write_tiny

pytest.importorskip("fastapi", reason="needs the extra [serve]")

import api_server
import httpx
from api_server import Served, served

from sluice.engine import Engine
from sluice.server import live

KEY = "a key of this test's".replace(" ", "-")
RATE = 3 << 20  # bytes a second of the emulated disk: a token takes tenths of a second, so that there is time to act


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A pool for half of the experts, and a model that never ends by itself."""
    path = write_tiny(tmp_path_factory.mktemp("page") / "tiny.gguf", n_layers=4, n_expert=16).path
    with Engine.open(path, expert_slots=32, ctx=512, streams=2, read_rate=RATE) as engine:
        engine.tokenizer.eos_ids = frozenset()
        yield engine


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Page]:
    if chromium.find() is None:
        pytest.skip("needs Chromium, as apt install chromium brings it")
    with chromium.open_page() as tab:
        tab.dress(width=1280, height=900)
        yield tab


@pytest.fixture
def page(tab: chromium.Page) -> Iterator[chromium.Page]:
    """A tab; afterwards, whatever its console complained of fails the test."""
    tab.errors.clear()
    yield tab
    errors = list(tab.errors)
    tab.go("about:blank")  # ends its connections
    assert not errors


@pytest.fixture
def server(engine: Engine) -> Iterator[Served]:
    with served(engine) as server:
        yield server


def open_(page: chromium.Page, server: Served) -> None:
    page.go(server.url)
    page.wait("document.querySelector('#link').dataset.state === 'live'")


def ask(page: chromium.Page, text: str, *, tokens: int | None = 8) -> None:
    if tokens is not None:
        page.evaluate(f"document.querySelector('#set-max').value = {tokens}")
    page.evaluate("document.querySelector('#composer-text').focus()")
    page.type(text)
    page.press("Enter")


def answered(page: chromium.Page) -> None:
    """Wait for one answer, complete."""
    page.wait(
        "document.querySelectorAll('.message.assistant').length === 1"
        " && !document.querySelector('[aria-busy]') && document.querySelector('.message:last-child .facts')"
    )


MAP = "[...document.querySelector('#map-canvas').getContext('2d').getImageData(0, 0, 9999, 200).data].join()"

# --- over HTTP


def test_the_page_and_its_files_come_with_a_policy_that_allows_nothing_from_elsewhere(server: Served) -> None:
    html = httpx.get(server.url).text
    files = re.findall(r'(?:href|src)="(page/[^"]+)"', html)
    assert {"page/app.js", "page/style.css"} <= set(files)
    for path in ["", *files]:
        answer = httpx.get(f"{server.url}/{path}")
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_no_file_of_the_page_names_another_place_or_makes_html_of_text() -> None:
    for _, raw in live.page_files().values():
        text = raw.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert not re.search(r"<script>|<style>|\sstyle=|\son\w+=\"", text)


def test_the_page_needs_no_key_and_what_it_shows_does(engine: Engine) -> None:
    with served(engine, keys=(KEY,)) as server:
        assert {httpx.get(f"{server.url}{path}").status_code for path in live.open_paths()} == {200}
        assert httpx.get(f"{server.url}/live").status_code == 401
        assert httpx.get(f"{server.url}/page/../../jobs.py").status_code in (401, 404)


# --- in the browser


def test_it_chats_and_the_map_moves(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    page.wait("document.querySelector('#map-canvas').height > 50")
    before = page.evaluate(MAP)
    ask(page, "the river runs")
    answered(page)
    assert page.text(".message.user .body") == "the river runs"
    assert page.text(".message.assistant .body").strip()
    facts = page.text(".facts")
    assert re.search(r"8 tokens · [\d.]+ tok/s · first after .* · prompt \d+ tokens · seed \d+ · cut", facts)
    page.wait("document.querySelector('#n-miss').textContent.includes('%')")
    assert page.evaluate(MAP) != before
    page.wait("document.querySelector('#map-summary').textContent.match(/^[1-9]\\d* of 64 experts are in memory/)")
    page.wait("document.querySelector('#c-disk .line').getAttribute('d').match(/[LM]\\d+(\\.\\d+)? [0-3]?\\d\\./)")
    assert page.evaluate("document.querySelector('#announce').textContent").strip()


def test_the_map_tells_by_keyboard_what_it_shows(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    page.wait("document.querySelector('#map-canvas').height > 50")
    page.evaluate("document.querySelector('#map').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.press(key)
    assert re.match(r"Layer [12], expert [12]: (in memory|on disk), ", page.text("#map-read"))


def test_escape_stops_an_answer_and_what_was_said_stays(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    ask(page, "go on", tokens=400)
    page.wait("document.querySelector('.message.assistant .body').textContent.length > 3")
    page.wait("document.querySelector('#requests .request')")
    page.press("Escape")
    answered(page)
    assert "stopped" in page.text(".facts") and page.text(".message.assistant .body")
    page.wait("!document.querySelector('#req-none').hidden")  # the server let it go


def test_regenerate_edit_and_new_chat(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    ask(page, "one", tokens=3)
    answered(page)
    page.click(".message.assistant [aria-label^=Regenerate]")
    answered(page)
    page.click(".message.user [aria-label^=Edit]")
    assert page.evaluate("document.querySelector('#composer-text').value") == "one"
    page.type(" and two")
    page.press("Enter")
    answered(page)
    said = page.evaluate("[...document.querySelectorAll('.message.user .body')].map(e => e.innerText)")
    assert said == ["one and two"]
    page.click("#new-chat")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0


def test_shift_enter_is_a_new_line_and_markup_stays_text(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    page.evaluate("document.querySelector('#composer-text').focus()")
    page.type("<img src=x onerror=alert(1)>")
    page.press("Enter", shift=True)
    page.type("</p><b>bold</b>")
    ask(page, "", tokens=2)
    answered(page)
    assert page.text(".message.user .body") == "<img src=x onerror=alert(1)>\n</p><b>bold</b>"
    assert page.evaluate("document.querySelectorAll('.message img, .message b').length") == 0


def answer_with(page: chromium.Page, status: int, body: str) -> None:
    """Let the next questions be answered with this instead of by the server."""
    options = {"status": status, "headers": {"Retry-After": "7"}}
    page.evaluate(f"window.fetch = async () => new Response({json.dumps(body)}, {json.dumps(options)})")


def chunk(**delta: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


def test_what_a_model_thinks_is_folded_away(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    body = chunk(reasoning_content="Two and ") + chunk(reasoning_content="two.") + chunk(content="Four.")
    answer_with(page, 200, body + "data: [DONE]\n\n")
    ask(page, "2 + 2?")
    answered(page)
    assert page.text(".message.assistant .body") == "Four."
    assert page.evaluate("document.querySelector('details.thought p').textContent") == "Two and two."
    assert not page.evaluate("document.querySelector('details.thought').open")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, "{}", "full. Try again in 7 seconds"),
        (200, chunk(content="Half an ans"), "broke off"),
        (200, chunk(content="Half") + 'data: {"error": {"message": "the disk is gone"}}\n\n', "the disk is gone"),
        (200, "data: [DONE]\n\n", "empty"),
    ],
)
def test_what_goes_wrong_is_said_plainly(
    page: chromium.Page, server: Served, status: int, body: str, said: str
) -> None:
    open_(page, server)
    answer_with(page, status, body)
    ask(page, "hello")
    page.wait("document.querySelector('.message .error')")
    assert said in page.text(".message .error")
    assert page.evaluate("document.querySelector('#announce').textContent")


def test_what_the_server_refuses_is_said_in_its_words(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    ask(page, "the river " * 500)
    page.wait("document.querySelector('.message .error')")
    assert "context" in page.text(".message .error")
    page.errors[:] = [each for each in page.errors if "400 (Bad Request)" not in each]


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(page: chromium.Page, engine: Engine) -> None:
    with served(engine, keys=(KEY,)) as server:
        page.go(server.url)
        for key in ("not the key", KEY):
            page.wait("document.querySelector('#key-dialog').open")
            page.type(key)
            page.press("Enter")
        page.wait("document.querySelector('#link').dataset.state === 'live'")
        ask(page, "hello", tokens=2)
        answered(page)
        assert page.evaluate("JSON.stringify(sessionStorage)").count(KEY) == 1
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href").count(KEY) == 0
    page.errors[:] = [each for each in page.errors if "401" not in each and "ERR_" not in each]


def test_it_finds_a_server_again_that_was_restarted(
    page: chromium.Page, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(engine) as server:
        open_(page, server)
    page.wait("document.querySelector('#link').dataset.state === 'lost' && !document.querySelector('#offline').hidden")
    bind = api_server.bind
    monkeypatch.setattr(api_server, "bind", lambda host, _: bind(host, int(server.url.rpartition(":")[2])))
    with served(engine):
        page.wait("document.querySelector('#link').dataset.state === 'live'")
        assert page.evaluate("document.querySelector('#offline').hidden")
    page.errors[:] = [each for each in page.errors if "ERR_" not in each]


def test_all_can_be_reached_by_tab_and_everything_has_a_name(page: chromium.Page, server: Served) -> None:
    open_(page, server)
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    for wanted in ("theme", "settings-open", "log", "composer-text", "send", "map"):
        assert wanted in reached
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea')]"
        ".filter(e => !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.id)"
    )
    assert nameless == []


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(page: chromium.Page, server: Served, width: int) -> None:
    page.dress(width=width, height=800)
    open_(page, server)
    for view in ("chat", "machine"):
        page.evaluate(f"document.body.dataset.view = '{view}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.dress(width=1280, height=900)


def test_screenshots_in_the_docs_are_small() -> None:
    folder = Path(__file__).parents[2] / "docs" / "img"
    pictures = sorted(folder.glob("serve-*.png"))
    assert [each.name for each in pictures] == ["serve-dark.png", "serve-light.png"]
    assert all(each.stat().st_size < 300_000 for each in pictures)
