"""The report page in a real browser: headless Chromium, without a network."""

import dataclasses
import html
import json
import re
import shutil
import subprocess

import pytest
import run_reports

from prunekit.delivery.pages.html_report import render_html

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COMPLAINTS = r"CONSOLE|Refused to|ERR_"
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


def browse(page, folder, *arguments):
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --proxy-server=127.0.0.1:9 --enable-logging=stderr"
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [BROWSER, *options.split(), *more.split(), offline, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    report = dataclasses.replace(run_reports.make(), stages=run_reports.STAGES)
    file.write_text(render_html(report), encoding="utf-8")
    return file


def test_the_browser_shows_tables_and_pictures_and_complains_of_nothing(page, tmp_path):
    result = browse(page, tmp_path, "--dump-dom")
    dom = result.stdout
    assert dom.count("<table") >= 6
    assert dom.count("<svg") >= 7
    assert len(re.findall(r"<tr", dom)) > 20
    assert not re.search(COMPLAINTS, result.stderr), result.stderr


def test_a_page_that_fetches_something_would_be_complained_of(page, tmp_path):
    copy = tmp_path / "fetching.html"
    image = '<img src="https://example.org/x.png" alt=""></body>'
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", image), encoding="utf-8")
    assert re.search(COMPLAINTS, browse(copy, tmp_path, "--dump-dom").stderr)


# What the layout came to. The page itself has no script: this goes into a copy of it.
PROBE = """<script>
const shown = element => element.getClientRects().length > 0;
const pictures = [...document.querySelectorAll("svg.picture")].filter(shown);
const letters = svg => [...svg.querySelectorAll("text")].map(text =>
  parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
const first = document.querySelector(".scroll");
const hinted = box => box.scrollWidth <= box.clientWidth || getComputedStyle(box).backgroundImage.includes("gradient");
const cells = [...document.querySelectorAll("td, p, dd, .sub")].map(e => parseFloat(getComputedStyle(e).fontSize));
parent.document.title = JSON.stringify({
  width: document.documentElement.scrollWidth, pictures: pictures.length,
  smallest: Math.min(...pictures.flatMap(letters)),
  table: first.getBoundingClientRect().top, fits: first.scrollWidth <= first.clientWidth,
  hinted: [...document.querySelectorAll(".scroll")].every(hinted), links: document.querySelectorAll("nav a").length,
  shown_links: [...document.querySelectorAll("nav a")].filter(link => link.checkVisibility()).length,
  text: Math.min(...cells), ground: getComputedStyle(document.body).backgroundColor});
</script></body>"""


def measured(page, folder, width, *arguments):
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8")).replace("</body>", PROBE)
    (folder / "probe.html").write_text(text, encoding="utf-8")
    # Headless windows may have a least width, so the page is laid out in a frame of the width that is meant.
    frame = folder / "frame.html"
    frame.write_text(f'<iframe src="probe.html" style="width:{width}px;height:900px;border:0"></iframe>')
    more = ("--virtual-time-budget=3000", "--allow-file-access-from-files", *arguments)
    found = re.search(r"<title>(.*?)</title>", browse(frame, folder, "--dump-dom", *more).stdout)
    assert found, "the probe did not run"
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_window_and_its_text_can_be_read(page, tmp_path, width):
    found = measured(page, tmp_path, width)
    assert found["width"] <= width
    assert found["pictures"] == 7, "two of the models, bars and schedule, in the form for this width; three histograms"
    assert found["smallest"] >= 9, "letters in pictures, in CSS pixels"
    assert found["text"] >= 12
    shot = tmp_path / "page.png"
    browse(page, tmp_path, f"--window-size={width},1200", f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000


def test_the_first_table_of_a_phone_is_near_the_top_and_whole(page, tmp_path):
    found = measured(page, tmp_path, 390)
    assert found["fits"] and found["hinted"]
    assert found["table"] < 1400, "two screens of a phone"
    assert found["links"] > 8 and found["shown_links"] == 0


def test_a_window_of_1280_pixels_at_400_percent_needs_no_sideways_scrolling(page, tmp_path):
    found = measured(page, tmp_path, 320)
    assert found["width"] <= 320
    assert found["text"] >= 12
    assert found["smallest"] * 4 >= 9, "letters in pictures, in pixels of the screen"


def test_the_page_follows_the_theme(page, tmp_path):
    dark, light = (
        measured(page, tmp_path, 800, f"--blink-settings=preferredColorScheme={scheme}")["ground"] for scheme in (0, 1)
    )
    assert max(map(int, re.findall(r"\d+", dark))) < 60
    assert min(map(int, re.findall(r"\d+", light))) > 200
