"""``nmrun serve``: what it answers, against the files; to whom; and the page in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import browser
import pytest
from verbs import verb

from nmrun.files import locks
from nmrun.report import serve


@contextlib.contextmanager
def served(path: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a page that is served in a thread."""
    server, address = serve.begun(path, host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(address: str, path: str, **headers: str) -> tuple[int, str, Any]:
    """Status, text and headers of an answer."""
    there = http.client.HTTPConnection("127.0.0.1", urlsplit(address).port, timeout=20)
    there.request("GET", path, headers=headers)
    answer = there.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def running(tmp_path: Path) -> Path:
    """A run that this process is at work on, once its folder is held."""
    folder = tmp_path / "outputs/digits/small_conv/step/2of4/s0-0123456789"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("# nmrun recipe=step\nseed: 0\n")
    log(folder, 10, 2.0)
    (folder / "run.log").write_text("begun <b>\n")
    return folder


def log(folder: Path, step: int, loss: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "epoch": 1, "train/loss": loss}) + "\n")


def test_it_tells_what_the_files_have(write: Any, tmp_path: Path) -> None:
    write("ste", "2:4", 0, 0.9)
    folder = running(tmp_path)
    log(folder, 20, float("nan"))
    log(folder, 30, 1.0)
    with locks.hold(folder), served(tmp_path / "outputs") as address:
        status, text, headers = get(address, "/state")
        told = json.loads(text)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert told["counts"] == {"finished": 1, "running": 1}
        place = "digits/small_conv/step/2of4/s0-0123456789"
        first = told["runs"][0]
        assert (first["folder"], first["state"], first["step"]) == (place, "running", 30)
        status, text, _ = get(address, f"/run?folder={quote(place)}")
        found = json.loads(text)  # NaN is not JSON
        assert found["curves"] == {"train/loss": [[10, 2.0], [20, None], [30, 1.0]]}
        assert found["log"] == "begun <b>\n"


@pytest.mark.parametrize(
    "folder", ["../secret", "digits/../../secret", "/etc", "", "digits", "%00", "digits/nothing"]
)
def test_no_path_of_a_request_is_opened(folder: str, write: Any, tmp_path: Path) -> None:
    write("ste", "2:4", 0, 0.9)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "run.log").write_text("secret")
    (secret / "result.json").write_text("{}")
    with served(tmp_path / "outputs") as address:
        assert get(address, f"/run?folder={quote(folder, safe='%')}")[0] == 404
        assert get(address, f"/{folder}run.log")[0] == 404


def test_who_may_read(write: Any, tmp_path: Path) -> None:
    write("ste", "2:4", 0, 0.9)
    with served(tmp_path / "outputs") as address:
        port = urlsplit(address).port
        assert "token" not in address
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert get(address, "/state", Host=host)[0] == 200
        for host in ("evil.example", f"localhost.evil.example:{port}", ""):
            assert get(address, "/state", Host=host)[0] == 403, "another site's name for loopback"
    with served(tmp_path / "outputs", "0.0.0.0") as address:
        token = urlsplit(address).query
        assert len(token) > 30
        for path in ("/", "/state", "/run?folder=x", "/state?token=", f"/state?{token}x"):
            assert get(address, path)[0] == 403
        assert get(address, f"/state?{token}", Host="node7")[0] == 200
        assert get(address, f"/?{token}")[0] == 200


def test_the_page_asks_no_other_host(write: Any, tmp_path: Path) -> None:
    write("ste", "2:4", 0, 0.9)
    with served(tmp_path / "outputs") as address:
        status, text, headers = get(address, "/")
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        nonce = re.search(r"'nonce-([^']+)'", policy)
        assert nonce is not None
        assert f'<script nonce="{nonce[1]}">' in text
        assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
        assert nonce[1] not in get(address, "/")[1]
        there = http.client.HTTPConnection("127.0.0.1", urlsplit(address).port, timeout=20)
        there.request("POST", "/state")
        assert there.getresponse().status == 501, "it only reads"


def test_mistakes_are_a_line(write: Any, tmp_path: Path, capsys: Any) -> None:
    assert verb("serve", str(tmp_path / "nowhere")) == 2
    assert capsys.readouterr().err.endswith("nowhere: no such folder\n")
    write("ste", "2:4", 0, 0.9)
    with served(tmp_path / "outputs") as address:
        port = str(urlsplit(address).port)
        assert verb("serve", str(tmp_path / "outputs"), "--port", port) == 2
        error = capsys.readouterr().err
        assert "name another with --host and --port" in error
        assert error.count("\n") == 1
    assert verb("serve", str(tmp_path / "outputs"), "--port", "99999") == 2


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_in_a_browser(width: int, scheme: str, write: Any, tmp_path: Path) -> None:
    folder = running(tmp_path)
    with (
        locks.hold(folder),
        served(tmp_path / "outputs") as address,
        browser.opened(width, scheme) as tab,
    ):
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda said: said.type == "error" and problems.append(said.text))
        tab.goto(address)
        tab.get_by_text("train/loss: 2.000").wait_for()
        assert tab.locator("#counts").inner_text() == "1 running"
        assert tab.locator("#log").inner_text() == "begun <b>\n"
        log(folder, 20, 1.5)
        tab.get_by_text("train/loss: 1.500").wait_for()
        points = tab.locator("polyline").get_attribute("points").split()
        assert [point.split(",")[0] for point in points] == ["0", "100"]
        assert browser.overflow(tab) == 0
        assert [problem for problem in problems if "favicon" not in problem] == []
