"""A headless Chromium over its DevTools protocol: open a page, evaluate, press keys, take a picture."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from commands import HANGS

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab; use it as a context manager."""

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 800), dark: bool = False):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--mute-audio",
            "--no-first-run",
            "--disable-extensions",
            "--disable-quic",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-background-timer-throttling",
            "--disable-renderer-backgrounding",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            f"--window-size={size[0]},{size[1]}",
            f"--user-data-dir={folder}",
        ]
        self.process = subprocess.Popen(
            [BINARY, *flags, *(["--force-dark-mode"] if dark else []), "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.number = 0

    def __enter__(self):
        from websockets.sync.client import connect

        end, port = time.monotonic() + HANGS, self.folder / "DevToolsActivePort"
        while not (port.exists() and port.read_text().count("\n")):
            assert self.process.poll() is None and time.monotonic() < end, "chromium did not start"
            time.sleep(0.05)
        base = f"http://127.0.0.1:{port.read_text().splitlines()[0]}"
        pages = json.load(urllib.request.urlopen(f"{base}/json", timeout=HANGS))
        self.ws = connect(
            next(p for p in pages if p["type"] == "page")["webSocketDebuggerUrl"],
            max_size=None,
            open_timeout=HANGS,
        )
        return self

    def __exit__(self, *error):
        with contextlib.suppress(Exception):
            self.ws.close()
        self.process.kill()
        self.process.wait()

    def call(self, method: str, **params):
        self.number += 1
        self.ws.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            m = json.loads(self.ws.recv(timeout=HANGS))
            if m.get("id") == self.number:
                assert "error" not in m, m
                return m["result"]

    def open(self, address: str) -> None:
        self.call("Page.enable")
        self.call("Page.navigate", url=address)

    def js(self, expression: str):
        out = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in out, out
        return out["result"].get("value")

    def until(self, expression: str, timeout: float = HANGS):
        """Wait until the JavaScript expression is true -> its value."""
        end = time.monotonic() + timeout
        while True:
            value = self.js(expression)
            if value:
                return value
            assert time.monotonic() < end, (
                f"{expression} did not become true: {self.js('document.body.innerText')[:600]}"
            )
            time.sleep(0.02)

    def key(self, key: str, down: bool = True, up: bool = True) -> None:
        code = f"Key{key.upper()}" if key.isalpha() and len(key) == 1 else key
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        if number := {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}.get(key):
            text["windowsVirtualKeyCode"] = number
        if down:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code, **text)
        if up:
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code)

    def click(self, selector: str) -> None:
        x, y = self.js(
            f"(()=>{{const r=document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [r.x+r.width/2,r.y+r.height/2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
