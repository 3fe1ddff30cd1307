"""The report page in a real browser: headless Chromium, without a network."""

import re
import shutil
import subprocess

import pytest
import run_reports

from prunekit.delivery.report import render_html

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


def browse(page, folder, *arguments):
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --host-resolver-rules=MAP*~NOTFOUND --enable-logging=stderr"
    command = [BROWSER, *options.split(), *more.split(), f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render_html(run_reports.make()), encoding="utf-8")
    return file


def test_the_browser_shows_tables_and_pictures_and_complains_of_nothing(page, tmp_path):
    result = browse(page, tmp_path, "--dump-dom")
    dom = result.stdout
    assert dom.count("<table") >= 6
    assert dom.count("<svg") >= 5
    assert len(re.findall(r"<tr", dom)) > 20
    assert not re.search(r"CONSOLE|Refused to|ERR_", result.stderr), result.stderr


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_window(page, tmp_path, width):
    # A copy with a line of script that says what the layout came to; the page itself has none.
    probe = '<script>document.title = "wide " + document.documentElement.scrollWidth</script></body>'
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8")).replace("</body>", probe)
    copy = tmp_path / "probe.html"
    # Headless windows have a least width, so the page is laid out in a frame of the width that is meant.
    frame = tmp_path / "frame.html"
    copy.write_text(text.replace("document.title", "parent.document.title"), encoding="utf-8")
    frame.write_text(f'<iframe src="{copy.name}" style="width:{width}px;height:900px;border:0"></iframe>')
    result = browse(frame, tmp_path, "--dump-dom", "--virtual-time-budget=3000", "--allow-file-access-from-files")
    found = re.search(r"<title>wide (\d+)</title>", result.stdout)
    assert found, result.stdout[:500]
    assert int(found[1]) <= width
    shot = tmp_path / "page.png"
    browse(page, tmp_path, f"--window-size={width},1200", f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000
