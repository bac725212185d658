"""A headless Chromium, driven over the DevTools protocol."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest


websocket = pytest.importorskip("websocket")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# What a key is to DevTools: its code, its number, and the text that it types.
KEYS = {
    "ArrowRight": ("ArrowRight", 39, ""),
    "Home": ("Home", 36, ""),
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    " ": ("Space", 32, " "),
}


def find() -> str | None:
    """The path of a Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser(folder: Path):
    """The DevTools port of a Chromium with its profile in `folder`, that knows no other host."""
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-extensions",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        "--remote-allow-origins=*",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    path = find()
    assert path is not None
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([path, *arguments], stdout=quiet, stderr=quiet)
    try:
        yield _port(folder / "DevToolsActivePort", process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(file: Path, process: subprocess.Popen, seconds: float = 60) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) > 1:
            return int(lines[0])
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start: exit status {process.poll()}")


class Page:
    """A tab: what it shows, and all events (`requests`, `problems`) since it was opened."""

    def __init__(self, port: int, width: int = 1280, height: int = 800):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new", method="PUT")
        with urllib.request.urlopen(request) as answer:
            self._target = json.load(answer)
        self._socket = websocket.create_connection(self._target["webSocketDebuggerUrl"], timeout=60)
        self._last = 0
        self.events: list[dict] = []
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def close(self) -> None:
        with contextlib.suppress(websocket.WebSocketException, OSError):
            self.call("Page.close")
        self._socket.close()

    def call(self, method: str, **params) -> dict:
        """The answer to a command; RuntimeError where it is an error."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._last:
                break
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """A "light" or "dark" page."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str):
        """The value of a JavaScript expression (awaited, as JSON)."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30):
        """The value of an expression, once it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # (While a page loads, there is nothing to ask yet.)
            if value := self.run(f"document.readyState === 'complete' && ({condition})"):
                return value
            time.sleep(0.05)
        raise TimeoutError(f"not true after {seconds} s: {condition}")

    def press(self, *keys: str) -> None:
        for key in keys:
            code, number, text = KEYS[key]
            both = {"key": key, "code": code, "windowsVirtualKeyCode": number}
            down = {"type": "keyDown" if text else "rawKeyDown", "text": text}
            self.call("Input.dispatchKeyEvent", **down, **both)
            self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def type(self, text: str) -> None:
        """Text into what has the focus, instead of what is there."""
        self.run("document.activeElement.select()")
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A click into the middle of an element."""
        self.drag(selector, 0.5, 0.5, steps=0)

    def drag(self, selector: str, start: float, end: float, steps: int = 8) -> None:
        """Across an element, from one fraction of its width to another."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        self._mouse("mousePressed", *self._at(selector, start), button="left", clickCount=1)
        for i in range(1, steps + 1):
            at = self._at(selector, start + (end - start) * i / steps)
            self._mouse("mouseMoved", *at, button="left")
        self._mouse("mouseReleased", *self._at(selector, end), button="left", clickCount=1)

    def hover(self, selector: str, fraction: float) -> None:
        self._mouse("mouseMoved", *self._at(selector, fraction))

    def _at(self, selector: str, fraction: float) -> tuple[float, float]:
        box = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        return box["left"] + fraction * box["width"], box["top"] + box["height"] / 2

    def _mouse(self, kind: str, x: float, y: float, **options) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def named(self) -> list[tuple[str, str]]:
        """The role and the name of all that a screen reader finds."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        value = lambda node, key: node.get(key, {}).get("value", "")  # noqa: E731
        return [(value(n, "role"), value(n, "name")) for n in nodes if not n["ignored"]]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    @property
    def problems(self) -> list[str]:
        """What the console says of errors and warnings, and exceptions of scripts."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                if params["type"] in ("error", "warning", "assert"):
                    found.append(" ".join(str(a.get("value", a)) for a in params["args"]))
            elif event["method"] == "Log.entryAdded":
                entry = params["entry"]
                if entry["level"] in ("error", "warning"):
                    found.append(f"{entry['text']} {entry.get('url', '')}")
        return found
