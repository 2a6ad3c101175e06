"""The page in a real browser, in front of the real server on the embedded pair.

DRAFTPROOF_SHOTS names a folder for the screenshots, to be looked at by a person.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.launch import free_port

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = sync_api.expect
expect.set_options(timeout=30_000)  # ms; an answer of these tests takes two or three seconds on a quiet core

CHROMIUM = Path("/usr/bin/chromium")
ARGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
FILES = Path(__file__).parents[2] / "draftproof" / "serve" / "page"
API_KEY = "a-key-of-the-test"
QUESTION = "Write a Python function that merges two sorted lists."
SERVE = ("--target", "smollm2-135m", "--method", "ddtree", "--budget", "16", "--max-num-seqs", "2")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is not on this machine"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    argv = [sys.executable, "-m", "draftproof.cli", "serve", *SERVE, "--port", str(port), "--api-key", API_KEY]
    with log.open("w") as out, subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT) as process:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield url
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGS))
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Callable[..., Any]]:
    """Open the page, with the key unless `key` is another. A script error or a refused resource fails the test."""
    contexts, faults = [], []

    def visit(*, key: str | None = API_KEY, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: faults.append(m.text) if "Content Security" in m.text else None)
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('draftproof.key', '{key}')")
        page.goto(server)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def shot(tmp_path: Path) -> Callable[[Any, str], None]:
    folder = Path(os.environ.get("DRAFTPROOF_SHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png")


def fill(page: Any, **settings: object) -> None:
    page.locator("#panel").evaluate("panel => panel.open = true")
    for name, value in settings.items():
        field = page.locator(f"#settings [name={name}]")
        field.select_option(str(value)) if name == "budget" else field.fill(str(value))
    page.locator("#panel").evaluate("panel => panel.open = false")


def ask(page: Any, words: str, **settings: object) -> None:
    fill(page, **settings)
    page.locator("#words").press_sequentially(words)  # keys, as a person presses them
    page.click("#send")


def until_done(page: Any) -> None:
    expect(page.locator("#send")).to_be_visible()


def number(page: Any, name: str) -> float:
    value = page.locator("dl div", has=page.locator(f"dt:text-is('{name}')")).last.locator("dd").inner_text()
    return float(value) if re.fullmatch(r"[\d.]+", value) else 0.0


def asked(page: Any) -> list[Any]:
    """The bodies of the chat requests from now on."""
    bodies: list[Any] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    return bodies


def running(server: str) -> float:
    """Requests in the engine, by the server's own metrics."""
    found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", httpx.get(f"{server}/metrics").text, re.M)
    assert found
    return float(found[1])


def test_streams_colours_and_true_numbers(visit: Any, shot: Any, server: str) -> None:
    page = visit()
    expect(page.locator("#model")).to_contain_text("smollm2-135m")
    ask(page, QUESTION, temperature=0, max_tokens=64)
    expect(page.locator(".text .drafted").first).to_be_visible()
    steps, words = number(page, "steps"), page.locator(".text").inner_text()
    page.wait_for_function("n => document.querySelectorAll('.strip button').length > n", arg=steps)
    assert page.locator("#stop").is_visible() and number(page, "tokens/s") > 0
    assert page.locator(".text").inner_text().startswith(words)
    shot(page, "streaming")
    until_done(page)
    shot(page, "answer")

    request = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64}
    request |= {"model": "default", "spec_decode_metrics": "summary"}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    told = httpx.post(f"{server}/v1/chat/completions", json=request, headers=headers, timeout=60).json()
    metrics = told["metrics"]["speculative_decoding"]
    assert page.locator(".text").text_content() == told["choices"][0]["message"]["content"]
    assert number(page, "tokens") == told["usage"]["completion_tokens"]
    assert number(page, "drafted nodes") == metrics["num_draft_tokens"]
    assert number(page, "acceptance length") == pytest.approx(metrics["mean_acceptance_length"], abs=0.006)
    assert number(page, "steps") == page.locator(".strip button").count()
    assert page.locator(".strip button:not([title*='no draft'])").count() == metrics["num_spec_steps"]
    assert number(page, "first token, s") > 0


def test_a_bar_shows_its_tree(visit: Any, shot: Any) -> None:
    page = visit()
    ask(page, QUESTION, temperature=0, max_tokens=48)
    until_done(page)
    bars = page.locator(".strip button")
    labels = [str(bar.get_attribute("aria-label")) for bar in bars.all()]
    accepted = [int(m[1]) if (m := re.search(r"(\d+) of \d+ drafted", text)) else 0 for text in labels]
    best = accepted.index(max(accepted))
    bars.nth(best).click()
    expect(page.locator(".tree")).to_be_visible()
    assert page.locator(".tree h2").inner_text() == labels[best]
    assert page.locator(".node.taken").count() == accepted[best] > 0
    assert page.locator(".node").count() == int(labels[best].split(" of ")[1].split()[0]) + 1  # with the root
    assert all(re.search(r"\d %$", text) for text in page.locator(".node.taken").all_inner_texts())
    drafted = "".join(page.locator(".node.taken code").all_inner_texts()).replace("·", " ").replace("↵", "\n")
    assert "".join(page.locator(".text .here.drafted").all_text_contents()) == drafted
    shot(page, "tree")

    bars.nth(best).press("ArrowLeft")
    page.keyboard.press("Enter")
    assert page.locator(".tree h2").inner_text() == labels[best - 1]
    page.click("text=Close")
    expect(page.locator(".tree")).to_be_hidden()
    page.uncheck("#colours")
    assert (
        page.locator(".text .drafted").first.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
    )


def test_stop_keeps_what_came(visit: Any, shot: Any, server: str) -> None:
    page = visit()
    for number_of, stop in enumerate((lambda: page.click("#stop"), lambda: page.keyboard.press("Escape"))):
        ask(page, "Tell a long story about a lighthouse.", max_tokens=600)
        answer = page.locator("article").nth(number_of)
        expect(answer.locator(".text span").nth(10)).to_be_attached()
        assert running(server) == 1
        stop()
        expect(answer.locator(".note")).to_have_text("Stopped.")
        words = answer.locator(".text").inner_text()
        deadline = time.monotonic() + 10
        while running(server):
            assert time.monotonic() < deadline, "the server goes on"
            time.sleep(0.1)
        assert len(words) > 20 and answer.locator(".text").inner_text() == words
    shot(page, "stopped")


def test_reload_keeps_the_chat_and_sends_nothing(visit: Any) -> None:
    page = visit()
    sent = asked(page)
    ask(page, "Say hello.", temperature=0, max_tokens=12, system="You are brief.", budget="chain")
    until_done(page)
    page.locator("#words").press_sequentially("And <b>good")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("bye</b>?")
    page.keyboard.press("Enter")
    until_done(page)
    first = page.locator(".text").first.text_content()
    assert [m["role"] for m in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert [sent[1]["messages"][i]["content"] for i in (2, 3)] == [first, "And <b>good\nbye</b>?"]
    assert all(body["speculation"] == {"budget": "chain"} and body["max_tokens"] == 12 for body in sent)

    before = page.locator("#log").inner_text()
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    assert page.locator("#log").inner_text() == before
    assert page.locator("#settings [name=max_tokens]").input_value() == "12"
    page.locator(".strip button").nth(1).click()
    expect(page.locator(".node.taken, .node").first).to_be_visible()

    fill(page, max_tokens=600)
    page.click("#again")
    expect(page.locator("article").last.locator(".text span").nth(3)).to_be_attached()
    page.reload()
    expect(page.locator(".note").last).to_have_text("The page was left while it came.")
    assert page.locator("article").last.locator(".text").inner_text()
    page.click("#new")
    page.reload()
    expect(page.locator("#hint")).to_be_visible()
    assert page.locator("article").count() == 0 and len(sent) == 3


def test_plain_decoding_has_no_colours(visit: Any) -> None:
    page = visit()
    ask(page, "Say hello.", max_tokens=8, seed=1, budget="none")
    until_done(page)
    assert page.locator(".text .drafted").count() == 0 and number(page, "drafted nodes") == 0
    page.locator(".strip button").last.click()
    expect(page.locator(".tree")).to_contain_text("no draft")


def test_html_stays_text(visit: Any) -> None:
    """The grammar makes the model answer with HTML; the request is the page's own in all else."""
    page, html = visit(), "<img src=x onerror=document.title=1><script>document.title=2</script>"

    def forced(route: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "html", "schema": {"enum": [html]}}}
        route.continue_(post_data={**route.request.post_data_json, "response_format": form})

    page.route("**/chat/completions", forced)
    ask(page, html, max_tokens=60)
    until_done(page)
    for _ in range(2):
        assert page.locator(".text").inner_text() == f'"{html}"' and page.locator(".ask").inner_text() == html
        assert page.locator("main img, main script").count() == 0 and page.title() == "draftproof"
        chat = page.evaluate("JSON.parse(sessionStorage.getItem('draftproof.chat.1'))")
        chat["turns"][0]["answer"]["content"] = [[f'"{html}"', True, 0]]  # as one piece of text, which no tokenizer has
        page.add_init_script(f"sessionStorage.setItem('draftproof.chat.1', {json.dumps(json.dumps(chat))})")
        page.reload()


def test_bytes_may_be_cut_anywhere(visit: Any) -> None:
    """The page's own reader of streams, given a stream byte by byte."""
    told = visit().evaluate(
        """async (text) => {
            const { events } = await import("/page/stream.js");
            const bytes = new TextEncoder().encode(text);
            const pull = (c) => (pull.at = (pull.at ?? -1) + 1) < bytes.length
                ? c.enqueue(bytes.slice(pull.at, pull.at + 1)) : c.close();
            const found = [];
            for await (const data of events(new ReadableStream({ pull }))) found.push(data);
            return found;
        }""",
        ": a comment\r\n\r\ndata: größe 日本 😀\n\nevent: x\r\ndata: one\r\ndata: two\r\n\r\ndata: [DONE]\n\ndata: cut",
    )
    assert told == ["größe 日本 😀", "one\ntwo", "[DONE]"]


def test_a_failure_in_words_and_a_retry(visit: Any, shot: Any) -> None:
    page = visit()
    ask(page, "Say hello.", max_tokens=10**8)
    expect(page.locator(".note.bad")).to_contain_text("context")
    shot(page, "failure")
    fill(page, max_tokens=8)
    page.context.set_offline(True)
    page.click("text=Retry")
    expect(page.locator(".note.bad")).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    page.click("text=Retry")
    until_done(page)
    assert page.locator("article").count() == 1 and page.locator(".text").inner_text()


def test_asks_for_the_key(visit: Any, shot: Any) -> None:
    page = visit(key=None)
    for key in ("wrong", API_KEY):
        expect(page.locator("#ask-key")).to_be_visible()
        page.fill("#key", key)
        shot(page, "key")
        page.keyboard.press("Enter")
    expect(page.locator("#model")).to_contain_text("smollm2-135m")
    expect(page.locator("#ask-key")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_small_screen(visit: Any, shot: Any, scheme: str) -> None:
    page = visit(viewport={"width": 360, "height": 640}, color_scheme=scheme, has_touch=True, is_mobile=True)
    ask(page, QUESTION, temperature=0, max_tokens=40)
    until_done(page)
    shot(page, f"small-{scheme}")
    page.locator(".strip button").nth(2).tap()
    page.locator(".scroll").scroll_into_view_if_needed()
    shot(page, f"small-tree-{scheme}")
    page.click("#panel summary")
    shot(page, f"small-settings-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    light = int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
    assert (light < 60) == (scheme == "dark")


def test_dark(visit: Any, shot: Any) -> None:
    page = visit(color_scheme="dark")
    ask(page, QUESTION, temperature=0, max_tokens=40)
    until_done(page)
    page.locator(".strip button").nth(2).click()
    shot(page, "dark")


def test_size() -> None:
    assert sum(path.stat().st_size for path in FILES.iterdir()) < 25 * 1024
