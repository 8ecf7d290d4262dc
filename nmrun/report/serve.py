"""``nmrun serve``: a page in the browser that follows the runs in a folder. It only reads.

The standard library's server is enough for one reader on this machine. Loopback needs no password,
but the name that the browser asked for has to be loopback's, so that no other site's page can read
it (DNS rebinding). Any other address asks for a token. A run is named by its folder, which has to
be one of those that there are: no path of a request is ever opened.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import secrets
from collections import Counter
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nmrun.errors import ConfigError
from nmrun.files import jsonl
from nmrun.report import status
from nmrun.verbs import Parser

PORT = 8765
POINTS = 400  # of a curve
LOG = 20_000  # bytes of a log's end
NAMES = ("localhost", "127.0.0.1", "::1")


def main(argv: list[str]) -> int:
    """``nmrun serve [PATH]``: serve until Ctrl-C; returns the exit status."""
    parser = Parser(
        prog="nmrun serve", description=(__doc__ or "").partition(": ")[2].split("\n\n")[0]
    )
    parser.add_argument(
        "path", nargs="?", default="outputs", type=Path, help="an output folder (default: outputs)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default 127.0.0.1: this machine alone; others ask for a token)",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free one")
    options = parser.parse_args(argv)
    server, address = begun(options.path, options.host, options.port)
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()
    return 0


def begun(path: Path, host: str, port: int) -> tuple[ThreadingHTTPServer, str]:
    """Begin to listen.

    Args:
        path: the folder with the runs.
        host: name or address.
        port: 0 for any free one.

    Returns:
        The server, whose ``serve_forever`` answers, and the address of the page.

    Raises:
        ConfigError: for a folder that is not there, and an address that cannot be listened at.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
    try:
        server = ThreadingHTTPServer((host, port), partial(Handler, path, token))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port}: {error}; name another with --host and --port") from None
    server.daemon_threads = True
    place = f"http://{host}:{server.server_address[1]}/"
    return server, f"{place}?token={token}" if token else place


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Handler(BaseHTTPRequestHandler):
    """Answers ``/``, ``/state`` and ``/run?folder=...``.

    Args:
        path: the folder with the runs.
        token: what a request has to have; empty: it has to ask for loopback by name.
        given: of the base class.
    """

    server_version, sys_version = "nmrun", ""
    timeout = 30

    def __init__(self, path: Path, token: str, *given: Any) -> None:
        self.path_of_runs, self.token = path, token
        super().__init__(*given)

    def do_GET(self) -> None:
        """Answer a request, if it may be."""
        asked = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(asked.query).items()}
        if not self._allowed(query.get("token", "")):
            return self._send(403, "text/plain", b"not allowed: open the address that was printed")
        if asked.path == "/":
            return self._page()
        content: Any = None
        if asked.path == "/state":
            content = state(self.path_of_runs)
        elif asked.path == "/run":
            content = run(self.path_of_runs, query.get("folder", ""))
        if content is None:
            return self._send(404, "text/plain", b"there is no such page or run")
        return self._send(200, "application/json", json.dumps(content).encode())

    def _allowed(self, token: str) -> bool:
        if self.token:
            return hmac.compare_digest(token.encode(), self.token.encode())
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return host in NAMES or (host is not None and _is_loopback(host))

    def _page(self) -> None:
        from nmrun.report.pages import filled

        nonce = secrets.token_urlsafe(16)
        text = filled("live.html", title=f"nmrun: {self.path_of_runs}", nonce=nonce)
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
        self._send(200, "text/html; charset=utf-8", text.encode(), policy)

    def _send(
        self, code: int, kind: str, content: bytes, policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(code)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address."""


def state(path: Path) -> dict[str, Any]:
    """How the sweeps and runs stand.

    Args:
        path: the folder with the runs.

    Returns:
        ``sweeps``, a line for each; ``counts`` of runs by state; ``runs``, those at work first, with
        their folder below ``path``.
    """
    every = status.runs(path)
    counts = Counter(each.state for each in every)
    order = {"running": 0, "failed": 1, "killed": 2, "interrupted": 3}
    every.sort(key=lambda each: order.get(each.state, 4))
    return {
        "sweeps": [line for folder, on in status.sweeps(path) for line in status.said(folder, on)],
        "counts": {name: counts[name] for name in status.STATES if counts[name]},
        "runs": [
            {**asdict(each), "folder": Path(each.folder).relative_to(path).as_posix()}
            for each in every
        ],
    }


def run(path: Path, folder: str) -> dict[str, Any] | None:
    """The curves and the log's end of a run.

    Args:
        path: the folder with the runs.
        folder: that of the run, below ``path``.

    Returns:
        ``curves``, points of step and value by what was logged, and ``log``; None where there is no
        such run.
    """
    places = {Path(each.folder).relative_to(path).as_posix(): each for each in status.runs(path)}
    if folder not in places:
        return None
    place = path / folder
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for line in jsonl.read(place / "metrics.jsonl")[0]:
        for key, value in line.items():
            if "/" in key and isinstance(value, int | float) and "step" in line:
                # JSON has no NaN
                point = line["step"], value if math.isfinite(value) else None
                curves.setdefault(key, []).append(point)
    return {
        "curves": {key: _thinned(points) for key, points in curves.items()},
        "log": _end(place / "run.log"),
    }


def _thinned(points: list[Any]) -> list[Any]:
    """At most ``POINTS`` of them, and the last."""
    every = -(-len(points) // POINTS)
    return points[:-1:every] + points[-1:]


def _end(file: Path) -> str:
    """The last lines of a file."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - LOG))
            return opened.read().decode(errors="replace")
    except OSError:
        return ""
