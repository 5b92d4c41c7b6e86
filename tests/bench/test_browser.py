"""The report in a real browser: no error, plots that answer, links that lead somewhere."""

import shutil

import pytest

from shapetune.bench import findings, page, schema
from shapetune.cache.record_set import RecordSet

from .test_report import HOSTILE, hostile_findings, quarantined, searched
from .test_schema import FILES

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (package chromium)")

_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    records = [searched(seq=s, mode=m) for s in (512, 1024) for m in ("fwd", "fwd_bwd")]
    payloads = [one.to_bytes() for one in (*records, quarantined())]
    found = findings.gather(RecordSet(payloads), [schema.read(path) for path in FILES])
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.render(found), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(
    scope="module",
    params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def opened(browser, address, request):
    """The report, opened; its console errors and the requests that left the file."""
    width, scheme = request.param
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view.errors, view.left = [], []
    view.on("console", lambda m: view.errors.append(m.text) if m.type == "error" else None)
    view.on("pageerror", lambda error: view.errors.append(str(error)))
    view.on("request", lambda r: view.left.append(r.url) if r.url.startswith("http") else None)
    view.goto(address)
    view.wait_for_selector("#plots-failures .main-svg")
    yield view
    view.close()


def test_it_opens_without_errors_and_fits_the_width(opened):
    assert opened.errors == []
    assert opened.left == []
    wide, inner = opened.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner
    for name in ("gains", "length", "landscape", "convergence", "time", "failures"):
        assert opened.locator(f"#plots-{name} .main-svg").count() > 0, name
    text, ground = opened.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    drawn = opened.locator("#plots-time .xtick text").first.evaluate(
        "e => getComputedStyle(e).fill"
    )
    assert drawn == text != ground


def test_a_plot_answers_a_hover_a_menu_and_the_links_lead_to_sections(opened):
    point = opened.locator("#plots-length .plot").first.locator(".point").first
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    opened.wait_for_selector("#plots-length .hoverlayer .hovertext")
    menu = opened.locator("#menu-length")
    before = opened.locator("#plots-length .plot").first.inner_html()
    menu.select_option(index=5)
    assert opened.locator("#plots-length .plot").first.inner_html() != before
    for link in opened.locator("nav a").all():
        link.click()
        target = link.get_attribute("href")
        box = opened.locator(target).bounding_box()
        opened.wait_for_function(
            "id => Math.abs(document.querySelector(id).getBoundingClientRect().top) < innerHeight",
            arg=target,
        )
        assert box is not None
    assert opened.errors == []


def test_it_follows_a_change_of_theme(browser, address):
    view = browser.new_page(color_scheme="light")
    view.goto(address)
    view.wait_for_selector("#plots-failures .main-svg")
    tick = view.locator("#plots-time .xtick text").first
    before = tick.evaluate("e => getComputedStyle(e).fill")
    view.emulate_media(color_scheme="dark")
    view.wait_for_function(
        "old => getComputedStyle(document.querySelector('#plots-time .xtick text')).fill !== old",
        arg=before,
    )
    view.close()


def test_a_plot_fits_a_window_that_was_narrow_for_a_while(browser, address):
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    view.goto(address)
    view.wait_for_selector("#plots-failures .main-svg")
    for width in (390, 1280):
        view.set_viewport_size({"width": width, "height": 900})
        view.wait_for_function(
            "() => { const part = '#plots-landscape ';"
            " const width = (of) => document.querySelector(part + of).getBoundingClientRect().width;"
            " return width('.heatmaplayer image') > 0.7 * width('.plot'); }"
        )
    view.close()


def test_names_of_others_are_read_as_they_are(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page.render(hostile_findings()), encoding="utf-8")
    view = browser.new_page()
    view.goto(path.as_uri())
    view.wait_for_selector("#plots-failures .main-svg")
    marks = {
        "gains": ".point", "length": ".point", "landscape": ".heatmaplayer image",
        "convergence": ".point", "time": ".bars:first-child .point", "failures": ".point",
    }  # fmt: skip
    for name, mark in marks.items():
        place = view.locator(f"#plots-{name}")
        place.scroll_into_view_if_needed()
        place.locator(mark).last.hover(force=True)
        hover = place.locator(".hoverlayer .hovertext").first
        hover.wait_for()
        assert HOSTILE in hover.text_content(), name
        view.mouse.move(0, 0)
    assert view.locator(".main-svg u").count() == 0
    view.close()
