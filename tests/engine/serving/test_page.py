"""The page at `/`, looked at by a headless Chromium: it chats, reads a document and shows what was kept of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from importlib.util import find_spec

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(find_spec("fastapi") is None, reason="needs the extra serve")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("websockets") is None, reason="needs Chromium and websockets"
)
DOCUMENT = "# The harbour\n\n" + "the office keeps watch on channel fourteen, and the <b>boat</b> is blue. " * 4
ENTER = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}


def ask(url, path, key=None, **body):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=20) as response:
        return response.read().decode(), response.headers


def test_the_page_is_one_file_that_may_run_and_fetch_nothing_else(serving):
    html, headers = ask(serving(api_key="sesame").url, "/")  # without the key: it asks for it
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag, rule in (('script type="module"', "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert not re.search(r"\bon\w+=\"|style=\"", html)  # which the rules would stop
    assert "{{" not in html


def test_what_is_told_of_a_document_is_what_its_rows_hold(serving):
    started = serving()
    told = json.loads(ask(started.url, "/v1/documents", text=DOCUMENT, name="harbour")[0])
    kept = json.loads(ask(started.url, f"/v1/documents/{told['id']}/kept")[0])
    document = started.service.shelf.get(told["id"]).document
    n = len(document.snapshot.ids)
    assert len(kept["tokens"]) == n == told["tokens"] > 64
    assert DOCUMENT[:250] in "".join(kept["tokens"])  # the last of it is fed with the question
    special = started.engine.tokenizer.special_ids
    assert kept["special"] == [i for i, token in enumerate(document.snapshot.ids) if token in special]
    positions, start = document.snapshot.rows.position.tolist(), 0
    for bits, lengths in zip(kept["bits"], told["layer_lengths"], strict=True):
        rows = np.frombuffer(base64.b64decode(bits), dtype=np.uint8).reshape(len(lengths), -1)
        for row, length in zip(np.unpackbits(rows, axis=1, bitorder="little"), lengths, strict=True):
            assert np.flatnonzero(row).tolist() == sorted(positions[start : start + length])
            start += length
    assert start == len(positions)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(started.url, "/v1/documents/doc-other/kept")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(serving(api_key="sesame").url, f"/v1/documents/{told['id']}/kept")


class Browser:
    """A tab of a headless Chromium, by the DevTools protocol. errors: what the page's console had to say."""

    def __init__(self, folder):
        from websockets.sync.client import connect

        self.process = subprocess.Popen(
            [
                CHROMIUM,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--disable-extensions", "--disable-background-networking", "--remote-debugging-port=0"),
                "--window-size=1300,900",  # a narrow one hides the document behind the conversation
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.errors, self.asked, self._number = [], [], 0
        port = folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port.exists() and "\n" in port.read_text()):
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.05)
        tabs = json.loads(ask(f"http://127.0.0.1:{port.read_text().split()[0]}", "/json/list")[0])
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self._connection = connect(address, max_size=1 << 26)
        self._socket = self._connection.__enter__()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv(timeout=60))).get("id") != self._number:
            if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(message["params"])
            if message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        assert "error" not in message, message
        return message["result"]

    def value(self, code):
        """Of an expression in the page, in which `$` is getElementById."""
        code = f"(($) => {code})(name => document.getElementById(name))"
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code, seconds=30):
        end = time.monotonic() + seconds
        while not self.value(code):
            assert time.monotonic() < end, f"it never was: {code}"
            time.sleep(0.02)

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && ($('model') || {}).textContent")

    def type(self, name, text):
        self.value(f"$('{name}').focus()")
        self.call("Input.insertText", text=text)

    def press(self, key, **more):
        self.call("Input.dispatchKeyEvent", type="keyDown", **{"key": key, "code": key, **more})
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def send(self, text):
        """A message by the Enter key."""
        self.type("message", text)
        self.press(**ENTER)

    def answers(self):
        return self.value("[...document.querySelectorAll('.answer')].map(one => one.textContent)")

    def rest(self):
        self.until("!document.querySelector('.writing')")

    def close(self):
        self._connection.__exit__(None, None, None)
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def browser(tmp_path):
    one = Browser(tmp_path / "chromium")
    yield one
    one.close()


@pytest.fixture
def endless(monkeypatch):
    """Replies that end at their length alone."""
    from cake_infer import Engine

    monkeypatch.setattr(Engine, "stop_ids", property(lambda engine: frozenset()))


@in_browser
def test_a_chat_streams_stops_and_remembers(serving, endless, slow, browser, alone, wait_for):
    started = serving()
    browser.go(started.url)
    assert browser.value("$('send').disabled")
    browser.value("$('to-settings').click()")
    browser.type("longest", "40")
    browser.type("temperature", "0")
    slow.seconds = 0.03
    browser.type("message", "one two")
    browser.press(**ENTER, modifiers=8)  # Shift: another line, and nothing is sent
    assert browser.answers() == []
    browser.send("three")
    lengths = set()
    while browser.value("document.querySelector('.writing') !== null"):
        lengths.add(len(browser.answers()[0]))
    assert len(lengths) > 5  # it came piece by piece
    slow.seconds = 0.0
    first = {"role": "user", "content": "one two\nthree"}
    reply = alone(started, messages=[first], max_new_tokens=40, temperature=0.0)
    assert browser.answers() == [reply.text]
    figures = browser.value("document.querySelector('.figures').textContent")
    assert f"kept {reply.stats.kept_tokens:.0f} of {reply.stats.full_tokens}" in figures
    assert "40 tokens" in figures
    assert "longest reply" in figures

    browser.send("and?")  # with what was said before
    browser.rest()
    history = [first, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "and?"}]
    second = alone(started, messages=history, max_new_tokens=40, temperature=0.0)
    assert browser.answers() == [reply.text, second.text]

    slow.seconds = 0.05
    browser.send("stop me")
    browser.until("(document.querySelectorAll('.answer')[2] || {textContent: ''}).textContent.length > 3")
    browser.press("Escape", windowsVirtualKeyCode=27)
    browser.rest()
    wait_for(lambda: started.service.scheduler.running == 0)
    assert "stopped" in browser.value("document.querySelectorAll('.figures')[2].textContent")
    browser.value("$('fresh').click()")
    assert browser.answers() == []
    assert browser.errors == []
    assert all(url.startswith((started.url, "data:")) for url in browser.asked)


@in_browser
def test_a_document_is_read_shown_and_asked_about(serving, browser):
    from cake_infer import Engine

    started = serving(load={"policy": "cake"})
    browser.go(started.url)
    browser.type("paste", DOCUMENT)
    browser.value("$('read').click()")
    browser.until("!$('kept').hidden")
    (shelved,) = started.service.shelf.told()
    document = started.service.shelf.get(shelved["id"]).document
    n, rows = document.tokens, document.snapshot.rows
    counts = np.bincount(rows.position.numpy(), minlength=n)
    text = "".join(browser.value("[...$('text').children].map(one => one.textContent)"))
    assert DOCUMENT[:250] in text  # as text: its <b> is none
    shades = browser.value("[...$('text').children].map(one => Number(one.classList[0].slice(1)))")
    expected = [0 if c == 0 else max(1, int(10 * c / rows.length.size + 0.5)) for c in counts.tolist()]
    assert shades == expected
    assert 0 in shades
    assert 10 in shades
    assert browser.value("$('name').textContent") == "The harbour"
    assert f"kept {document.kept_tokens:.0f} of {n} tokens a layer" in browser.value("$('summary').textContent")

    browser.value("$('layers').firstChild.focus()")  # by the keyboard: the second layer
    browser.press("ArrowRight", windowsVirtualKeyCode=39)
    browser.press(**ENTER)
    start = int(rows.length[0].sum())
    in_second = np.bincount(rows.position.numpy()[start : start + int(rows.length[1].sum())], minlength=n)
    shades = browser.value("[...$('text').children].map(one => Number(one.classList[0].slice(1)))")
    assert [shade > 0 for shade in shades] == (in_second > 0).tolist()
    assert browser.value("$('chosen').textContent").startswith("layer 2 of 2: ")

    browser.value("$('to-settings').click()")
    browser.type("temperature", "0")
    browser.type("longest", "12")
    for question in ("Which channel?", "Which boat?"):
        browser.send(question)
        browser.rest()
    found = browser.answers()
    browser.value("$('remove').click()")
    browser.until("!$('give').hidden")
    assert browser.errors == []
    engine = started.engine
    with Engine.load(engine.model_path, cache=engine.cache, chunk=engine.chunk, step="eager") as fresh:
        again = fresh.compress(messages=[{"role": "user", "content": DOCUMENT}])
        questions = ["Which channel?", "Which boat?"]
        replies = fresh.generate(questions, cache=again, max_new_tokens=12, temperature=0.0)
    assert found == [reply.text for reply in replies]


@in_browser
def test_errors_are_shown_and_the_message_is_there_again(serving, endless, browser):
    started = serving(api_key="sesame", max_prompt=400)
    browser.go(started.url)
    browser.send("hello")
    browser.until("$('ask').open")
    browser.type("key", "wrong")
    browser.press(**ENTER)
    browser.until("$('ask').open && !$('key').value")
    browser.type("key", "sesame")
    browser.press(**ENTER)
    browser.until("document.querySelector('.answer') && document.querySelector('.answer').textContent")
    browser.press("Escape", windowsVirtualKeyCode=27)
    browser.rest()
    browser.value("$('fresh').click()")
    long = "word " * 300
    browser.send(long)
    browser.until("document.querySelector('.turn .failed') !== null")
    assert "400" in browser.value("document.querySelector('.turn .failed').textContent")
    assert browser.value("$('message').value") == long.strip()
    browser.value("$('to-settings').click()")
    browser.type("budget", "3")
    browser.type("paste", DOCUMENT)
    browser.value("$('read').click()")
    browser.until("!$('trouble').hidden")
    assert "budget of 3" in browser.value("$('trouble').textContent")
    assert browser.value("$('paste').value") == DOCUMENT
    expected = {"the server responded with a status of 400", "the server responded with a status of 401"}
    told = {error["entry"]["text"].split(": ")[1].split(" (")[0] for error in browser.errors}
    assert told <= expected, browser.errors


@in_browser
@pytest.mark.parametrize("width", [360, 700, 1300])
def test_nothing_is_wider_than_the_window(serving, browser, width):
    started = serving()
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False)
    browser.go(started.url)
    browser.value("$('to-settings').click()")
    narrow = browser.value("getComputedStyle($('to-document')).display !== 'none'")
    assert narrow == (width < 960)
    browser.type("message", "word" * 100)
    views = ["null", *(["$('to-document').click()"] if narrow else [])]
    for view in views:
        browser.value(view)
        assert browser.value("document.documentElement.scrollWidth") <= width
        shown = "[...document.querySelectorAll('body *')].filter(one => one.getClientRects().length)"
        wide = f"one.getBoundingClientRect().right > {width} + 0.5 && !one.closest('.away')"
        assert browser.value(f"{shown}.filter(one => {wide}).map(one => one.id || one.tagName)") == []
