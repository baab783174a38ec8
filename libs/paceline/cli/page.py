"""Serves a live page about a run: `paceline page`.

The page subscribes to facts like any client, so that no service spends time on it. It shows the
same content as the report.
"""

import asyncio
import hmac
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from paceline.addresses import loopback
from paceline.cli import access, report, run_files
from paceline.cli.active import read_figures
from paceline.cli.live import RunState, follow
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import DataLoss, PacelineError
from paceline.local import ports, tokens
from paceline.report import html, journal
from paceline.report.figures import OtherRun
from paceline.report.samples import read_samples
from paceline.report.summary import summarize
from paceline.rpc import names_loopback
from paceline.streams import LedgerCount
from paceline.telemetry import get_logger

COOKIE = "paceline_page"
_SCRIPT = Path(__file__).with_name("page.js")
_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'"
_HEADERS = {"content-security-policy": _POLICY, "cache-control": "no-store"}
_REST = 20.0
"""Pause after a drawing, as a multiple of its duration: at most a twentieth of a core."""
_LEAST_REST_S, _FIGURES_REST_S = 1.0, 2.0
_CLOCK = "%H:%M:%S"
_NOTHING = "<p class='empty'>the run has not begun</p>"


class LivePage:
    """The latest drawing and state of a run."""

    def __init__(
        self,
        config: ServiceConfig,
        files: run_files.RunFiles,
        folder: Path,
        other: OtherRun | None = None,
    ) -> None:
        """`folder`: private folder of this page for copies of the journal. `other`: a run to show
        beside this one.
        """
        self._config, self._files, self._other = config, files, other
        self._copy = replace(files, directory=folder)
        self._due = asyncio.Event()
        self._due.set()
        self.state = RunState(config.run.id, 0, lambda record: self._due.set())
        self.drawn, self.drawings = _NOTHING, 0
        self._figures: dict[str, str] = {}
        self._answered_at = time.strftime(_CLOCK)
        self._read_s = float("-inf")
        self._reading = asyncio.Lock()

    async def draw(self) -> None:
        """Draws the page after each finished step; never returns."""
        while True:
            await self._due.wait()
            self._due.clear()
            began = time.monotonic()
            try:
                settings = self._files.read_config()
                ledger = await report.collect(self._config, self._copy, settings)
                self.drawn = await asyncio.to_thread(self._content, ledger, settings)
            except DataLoss:
                pass  # the run has not begun
            except PacelineError as error:  # the run's Redis is gone or restarts
                get_logger("page").info("the last drawing stays", error=str(error))
            self.drawings += 1
            await asyncio.sleep(max(_LEAST_REST_S, _REST * (time.monotonic() - began)))

    def _content(self, ledger: LedgerCount, settings: Mapping[str, Any]) -> str:
        history = journal.read_history(self._copy.directory / report.JOURNAL)
        samples = read_samples(self._copy.directory / report.SAMPLES)
        summary = summarize(self._files.run_id, history, ledger, {}, settings)
        return html.content(summary, history, samples, self._other)

    async def watch(self) -> None:
        """Follows the run's facts until it ends."""
        await follow(self._config, self.state)
        self._due.set()

    async def figures(self) -> dict[str, str]:
        """The queues of the run and the chain of waits, read at most every two seconds for all
        browsers together.
        """
        async with self._reading:
            if time.monotonic() - self._read_s >= _FIGURES_REST_S:
                self._figures = await read_figures(self._config)
                self._read_s = time.monotonic()
                if self._figures:
                    self._answered_at = time.strftime(_CLOCK)
                else:
                    waits = f"no answer of the coordinator since {self._answered_at}"
                    self._figures = {"waits": f"{waits}, at {self._config.addresses.coordinator}"}
            return self._figures

    def shown_state(self) -> dict[str, Any]:
        """The state of the run, and the number of the drawing."""
        return {
            "drawings": self.drawings,
            "complete": self.state.complete,
            "total_steps": self.state.total_steps,
            "phase": self.state.phase,
            "failure": self.state.failure,
            "slots": dict(sorted(self.state.holders.items())),
            "away": list(self.state.away),
        }


def page_app(page: LivePage, run_id: str, token: str) -> Starlette:
    """The web application; `token` opens it, first in the address, then as a cookie."""

    def is_token(given: str) -> bool:
        return hmac.compare_digest(given.encode(), token.encode())

    async def answer(request: Request) -> Response:
        part, given = request.path_params["part"], request.query_params.get("token", "")
        if not part and given:
            if not is_token(given):
                return _refused()
            redirect = RedirectResponse("/", HTTPStatus.SEE_OTHER)
            redirect.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return redirect
        near = names_loopback(request.headers.get("host", ""))
        if not (near and is_token(request.cookies.get(COOKIE, ""))):
            return _refused()
        match part:
            case "":
                return HTMLResponse(_frame(run_id), headers=_HEADERS)
            case "content":
                return HTMLResponse(page.drawn, headers=_HEADERS)
            case "state":
                return JSONResponse(page.shown_state())
            case "figures":
                found = await page.figures()
                return JSONResponse(
                    {name: (one, html.meaning(name)) for name, one in found.items()}
                )
            case "page.js":
                script = _SCRIPT.read_text(encoding="utf-8") + html.read_asset("tips.js")
                return Response(script, media_type="text/javascript")
            case "style.css":
                return Response(html.read_asset("style.css"), media_type="text/css")
        return Response(status_code=HTTPStatus.NOT_FOUND)

    return Starlette(routes=[Route("/{part:path}", answer)])


def _frame(run_id: str) -> str:
    head = '<link rel="stylesheet" href="style.css"><script src="page.js" defer></script>'
    body = '<main><p class="note" id="state">connecting</p>'
    body += '<p class="queues" id="queues"></p><p class="empty" id="waits"></p>'
    body += f'<div id="run">{_NOTHING}</div></main>'
    return html.document(f"Paceline run {run_id}, live", head, body)


def _refused() -> Response:
    words = "Open the address that `paceline page` has printed: it contains the token."
    return Response(words, HTTPStatus.UNAUTHORIZED)


async def serve_page(
    run: str | None, settings: Sequence[Path], port: int, console: Console, against: str = ""
) -> int:
    """Serves the page until Ctrl-C, also after the run has ended; returns 0.

    `settings`: settings of the run, instead of its name. `against`: a run beside it. Raises
    NotFound for an unknown run, Unavailable if its Redis is gone or the port is in use.
    """
    found = access.directory_of(run, settings)
    config = load_config(ServiceConfig, "local", [found / "config.toml"])
    tokens.use_run_tokens(config)
    files, token = run_files.files_of(config), secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="paceline-page-") as folder, _listening(port) as door:
        other = await report.read_other(against, files.read_config()) if against else None
        page = LivePage(config, files, Path(folder), other)
        app = page_app(page, files.run_id, token)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        address = f"http://{loopback()}:{door.getsockname()[1]}/?token={token}"
        console.print(
            f"live page of {files.run_id}: [bold]{address}[/]; Ctrl-C ends it, not the run",
            highlight=False,
            soft_wrap=True,
        )
        beside = [asyncio.create_task(one) for one in (page.draw(), _follow(page, console))]
        try:
            await server.serve(sockets=[door])
        finally:
            for task in beside:
                task.cancel()
            for defect in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(defect, Exception):
                    raise defect
    return 0


def _listening(port: int) -> socket.socket:
    """A listening socket, so that an early browser waits for the server. `port` 0: any free
    port.
    """
    ports.require_free(f"{loopback()}:{port}", "--port")
    listening = ports.bound(loopback().strip("[]"), port or ports.free_ports(1)[0])
    listening.listen()
    return listening


async def _follow(page: LivePage, console: Console) -> None:
    try:
        await page.watch()
    except PacelineError as error:
        console.print(f"the page lost the run: {error}", markup=False, highlight=False)
