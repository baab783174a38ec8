"""A headless Chromium, driven over its own pipe with the DevTools protocol; the browser is the only
dependency.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.local.patience import patient

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_READS, _WRITES = 3, 4
"""Descriptors from which Chromium reads commands and to which it writes answers."""


class Tab:
    """One page in a separate browser."""

    def __init__(self, profile: Path, width: int, height: int = 2400) -> None:
        hears, self._asks = os.pipe()
        self._answers, says = os.pipe()
        command = [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        script = f'exec "$@" {_READS}<&{hears} {_WRITES}>&{says}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *command],
            pass_fds=(hears, says),
            stderr=subprocess.DEVNULL,
        )
        os.close(hears)
        os.close(says)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command; returns its answer. Raises RuntimeError for an error and for silence."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next(method)
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                answer: dict[str, Any] = found["result"]
                return answer

    def _next(self, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], patient(30))[0]:
                raise RuntimeError(f"{method}: Chromium is silent")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError(f"{method}: Chromium has ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, address: str, until: str) -> None:
        """Returns when the expression `until` is true; it is evaluated after every change of the
        page.
        """
        self.ask("Page.navigate", url=address)
        self.value(
            f"""new Promise((resolve) => {{
              const look = () => {{ if ({until}) resolve(true); }};
              new MutationObserver(look).observe(document, {{
                subtree: true, childList: true, characterData: true }});
              addEventListener("load", look);
              look();
            }})"""
        )

    def screenshot(self, path: Path) -> None:
        """Writes a screenshot of the whole page."""
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def __enter__(self) -> Tab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._asks)
        os.close(self._answers)
