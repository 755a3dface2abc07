"""The console: who may see it and what its pages show; in a real Chromium where there is one."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.test_chat import U5, ask, echo
from tokenlake.api.console import charts, render, session, strip

STATIC = Path(render.__file__).parent / "static"
PAGES = ("/", "/console/groups/g", "/console/rollouts/g_g0", "/console/search?q=g", "/console/sql?q=SELECT+1")


@contextlib.contextmanager
def logged_in(door: Door) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=door.url) as browser:
        answer = browser.post("/console/login", data={"token": TOKEN}, headers={"Origin": door.url})
        assert answer.status_code == 303
        yield browser


def two_turns(door: Door) -> None:
    """A group with a sealed rollout of two turns, and one that failed."""
    rollouts = door.register(n=2)
    agent = door.agent(rollouts[0])
    first = ask(agent, [U5])
    second = ask(agent, [U5, echo(first), {"role": "user", "content": "<b>again</b>"}])
    door.client.seal("g_g0", reward=1.0, terminal_response_id=second.id)
    door.client.fail("g_g1", reason="environment_failed")
    door.client.publish("g")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_asks_for_the_login_first(door: Door, path: str) -> None:
    with httpx.Client(base_url=door.url) as browser:
        answer = browser.get(path)
        assert answer.status_code == 401
        assert 'name="token"' in answer.text
        forged = {session.COOKIE: "99999999999.AAAA"}
        assert browser.get(path, headers={"Cookie": f"{session.COOKIE}={forged[session.COOKIE]}"}).status_code == 401
        # The token itself is no session: it never has to lie in a cookie.
        assert browser.get(path, headers={"Cookie": f"{session.COOKIE}={TOKEN}"}).status_code == 401


def test_the_cookie_is_http_only_strict_and_holds_no_token(door: Door) -> None:
    with httpx.Client(base_url=door.url) as browser:
        assert browser.post("/console/login", data={"token": "wrong"}).status_code == 403
        answer = browser.post("/console/login", data={"token": TOKEN})
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie
        assert browser.get("/").status_code == 200
        # It opens pages and no route that changes anything.
        assert browser.get("/api/v1/groups").status_code == 401
        assert browser.put("/api/v1/groups/x", json={"n": 1}).status_code == 401
        assert browser.post("/console/logout").status_code == 303
        assert browser.get("/").status_code == 401


def test_a_session_ends_with_its_time_and_with_the_token(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged_in(door) as browser:
        assert browser.get("/").status_code == 200
        monkeypatch.setattr(door.service, "token", "another")
        assert browser.get("/").status_code == 401
        monkeypatch.undo()
        expires = int(browser.cookies[session.COOKIE].split(".")[0])
        monkeypatch.setattr(session, "time", SimpleNamespace(time=lambda: expires + 1.0))
        assert browser.get("/").status_code == 401


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://elsewhere.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_form_of_another_site_is_refused(door: Door, headers: dict[str, str]) -> None:
    with logged_in(door) as browser:
        assert browser.post("/console/login", data={"token": TOKEN}, headers=headers).status_code == 403
        assert browser.post("/console/logout", headers=headers).status_code == 403
        assert browser.get("/").status_code == 200


def test_every_page_forbids_what_is_inline_or_from_elsewhere_and_has_neither(door: Door) -> None:
    two_turns(door)
    with logged_in(door) as browser:
        for path in (*PAGES, "/console/login", "/console/groups/none", "/console/sql", "/console/search"):
            answer = browser.get(path, follow_redirects=True)
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy
            assert re.findall(r"<script(?! src=\"/console/static/)|<style| style=| on[a-z]+=", answer.text) == []
            assert re.findall(r"(?:src|href|action)=\"(?!/|\?|#|data:)[^\"]*", answer.text) == []


def test_a_page_that_is_not_there_says_so(door: Door) -> None:
    with logged_in(door) as browser:
        for path in ("/console/groups/none", "/console/rollouts/none_g0", "/console/rollouts/no-form"):
            answer = browser.get(path)
            assert answer.status_code == 404
            assert "Back to the overview" in answer.text
        assert browser.get("/console/static/..%2Fpages.py").status_code == 404


def test_an_empty_lake_says_what_to_do_next(door: Door) -> None:
    with logged_in(door) as browser:
        assert "curl -X PUT" in browser.get("/").text


def test_what_agents_say_is_text_and_never_markup(door: Door) -> None:
    two_turns(door)
    with logged_in(door) as browser:
        for path in ("/console/search?q=%3Cb%3Ex", "/console/sql?q=%3Cscript%3E", "/console/sql?q=SELECT+'%3Cb%3Ex'"):
            text = browser.get(path).text
            assert "<b>x" not in text
            assert "<script>" not in text


def test_the_overview_counts_what_is_there(door: Door) -> None:
    two_turns(door)
    door.register("later", 3)
    with logged_in(door) as browser:
        text = browser.get("/").text
    assert re.findall(r"<dt>([^<]*)</dt><dd[^>]*>([^<]*)</dd>", text)[:5] == [
        ("Open groups", "1"),
        ("Published", "1"),
        ("Dropped", "0"),
        ("Rollouts", "5"),
        ("Calls captured", "2"),
    ]
    assert re.findall(
        r"<td>(?:<a [^>]*>)?(environment_failed|no_history)(?:</a>)?</td><td class=\"n\">(\d+)</td>", text
    ) == [
        ("environment_failed", "1"),
        ("no_history", "1"),
    ]
    assert text.index('groups/later"') < text.index('groups/g"'), "open groups come first"


def test_a_reason_leads_to_its_rollouts_and_so_does_a_query(door: Door) -> None:
    two_turns(door)
    with logged_in(door) as browser:
        assert '<a href="/console/search?q=environment_failed">environment_failed</a>' in browser.get("/").text
        found = browser.get("/console/search?q=environment_failed")
        assert (found.status_code, found.headers["location"]) == (303, "/console/rollouts/g_g1")
        assert "Nothing holds" in browser.get("/console/search?q=environment_fail").text
        asked = browser.get(
            "/console/sql", params={"q": "SELECT rollout_id, group_id, reason FROM rollouts ORDER BY 1"}
        )
        links = re.findall(r'<td><a href="([^"]+)">', asked.text)
        page = ["/console/rollouts/g_g0", "/console/groups/g", "/console/rollouts/g_g1", "/console/groups/g"]
        assert links == page


def test_the_rollout_page_shows_each_token_as_the_lake_has_it(door: Door) -> None:
    two_turns(door)
    with logged_in(door) as browser:
        text = browser.get("/console/rollouts/g_g0").text
    shown = re.findall(r'<span class="t (c|s l\d)" title="position (\d+) · id (\d+) · ([^"]*)">', text)
    lake = door.service.lake.sql(
        "SELECT input_ids, token_mask, logprobs FROM ready_rows WHERE rollout_id = ?", ["g_g0"]
    ).fetchall()
    ids, mask, logprobs = lake[0]
    assert [int(token_id) for _, _, token_id, _ in shown] == ids
    assert [int(position) for _, position, _, _ in shown] == list(range(len(ids)))
    assert [int(css != "c") for css, _, _, _ in shown] == mask
    for (_, _, _, said), sampled, logprob in zip(shown, mask, logprobs, strict=True):
        assert (f"logprob {logprob:.4f}" in said) == bool(sampled)


def test_a_strip_knows_the_version_of_each_token_and_shows_a_part() -> None:
    record: dict[str, Any] = {
        "call_id": "c", "position": 0, "first": 5, "sampled_before": 1, "weight_version": 3,
        "weight_version_spans": [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}],
        "token_ids": [1, 2], "token_mask": [1, 1], "logprobs": [-0.001, -9.0],
    }  # fmt: skip
    (call,) = strip.token_strip([record], lambda token_id: f"{token_id}\n")
    assert [(token.css, token.breaks, token.text) for token in call.tokens] == [
        ("s l6", True, "1⏎"),
        ("s l0", True, "2⏎"),
    ]
    assert ["weights 3" in call.tokens[0].title, "weights 4" in call.tokens[1].title] == [True, True]
    plain = record | {"weight_version_spans": None, "logprobs": [None, float("nan")]}
    (call,) = strip.token_strip([plain], str)
    assert [token.title.rpartition("weights ")[2] for token in call.tokens] == ["3", "3"]


def test_charts_count_everything_once() -> None:
    for values in ([], [1], [0, 0, 1], list(range(100))):
        for chart in (charts.by_number(values), charts.in_bins([float(value) for value in values])):
            assert chart.total == len(values)
            assert sum(bar.count for bar in chart.bars) == len(values)
            assert len(chart.bars) <= 12
            assert all(0 <= bar.y <= chart.height and bar.x + bar.width <= chart.width for bar in chart.bars)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_that_reading_needs(theme: int) -> None:
    """WCAG 2.2, success criterion 1.4.3: 4.5 to 1."""
    blocks = re.findall(r":root \{(.*?)\}", (STATIC / "console.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[theme]))
    pairs = [(text, ground) for text in ("ink", "dim", "link") for ground in ("ground", "raised")]
    pairs += [("good", "good-ground"), ("bad", "bad-ground"), ("wait", "wait-ground"), ("carried", "ground")]
    pairs += [("bad", "ground"), ("wait", "ground"), ("ink", "line")] + [("ink", f"l{level}") for level in range(7)]
    assert [(a, b) for a, b in pairs if _contrast(colours[a], colours[b]) < 4.5] == []
    button = ("#ffffff", "#06191d")[theme]
    assert _contrast(button, colours["accent"]) >= 4.5


# ---------------------------------------------------------------- in a browser


@pytest.fixture
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright (extra dev) is not installed")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        with contextlib.closing(browser):
            yield browser


@pytest.fixture
def wide(opened: Opener) -> Iterator[Door]:
    with opened() as door:
        two_turns(door)
        yield door


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_chromium_by_keyboard_alone(chromium: Any, wide: Door, scheme: str) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: "Content Security" in message.text and complaints.append(message.text))
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(wide.url)
    tab.keyboard.type(TOKEN)  # the field has the focus
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".figures")
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    tab.keyboard.press("/")
    tab.keyboard.type("g_g0")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("[data-strip]")
    assert tab.url.endswith("/console/rollouts/g_g0")
    tab.focus("[data-strip]")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "position 1 " in tab.inner_text("[data-readout]")
    tab.hover(".strip .t.s >> nth=0")
    assert "sampled, logprob" in tab.inner_text("[data-readout]")
    tab.goto(f"{wide.url}/console/sql")
    tab.keyboard.press("Control+a")
    tab.keyboard.type("SELECT 6 * 7 AS answer")
    tab.keyboard.press("Control+Enter")
    tab.wait_for_selector(".result td")
    assert tab.inner_text(".result td") == "42"
    assert tab.evaluate("document.cookie") == ""
    assert complaints == []
    assert [url for url in requests if not url.startswith((wide.url, "data:"))] == []
    context.close()


@pytest.mark.slow
def test_in_chromium_the_overview_follows_the_lake_and_says_when_it_cannot(chromium: Any, wide: Door) -> None:
    context = chromium.new_context()
    tab = context.new_page()
    tab.goto(wide.url)
    tab.fill("#token", TOKEN)
    tab.click("button[type=submit]")
    tab.wait_for_selector("[data-live]")
    wide.register("fresh", 2)
    tab.wait_for_selector("text=fresh", timeout=30_000)
    context.set_offline(True)
    tab.wait_for_selector("[data-state].lost", timeout=30_000)
    context.close()
