"""The report as a browser shows it: phone and desktop width, light and dark."""

import html
import json
import shutil
import subprocess

import pytest

from jobs.common.report import render
from jobs.common.report_data import read_report_data
from jobs.common.report_sections import sections, tiles
from tests.common.test_report import Page, filled  # noqa: F401

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (390, 1280)
# Blink's own numbers of the preferred colour scheme.
SCHEMES = {"dark": 0, "light": 1}
# The page runs no script, so one around it measures it. A frame has a viewport of its own, as a phone has.
MEASURE = """
const facts = [...document.querySelectorAll('iframe')].map((frame) => {
  const page = frame.contentDocument, style = (one) => frame.contentWindow.getComputedStyle(one);
  const box = (one) => one.getBoundingClientRect();
  const shown = (one) => one.checkVisibility() && box(one).width > 0 && box(one).height > 0;
  for (const each of page.querySelectorAll('details')) each.open = true;
  const plots = [...page.querySelectorAll('svg')].filter(shown);
  const outside = (plot) => [...plot.querySelectorAll('text')].filter((text) => text.textContent && (
    box(text).left < box(plot).left - 1 || box(text).right > box(plot).right + 1
    || box(text).top < box(plot).top - 1 || box(text).bottom > box(plot).bottom + 1));
  return {
    width: frame.clientWidth, needed: page.documentElement.scrollWidth,
    plots: plots.map((plot) => [plot.getAttribute('aria-label'), box(plot).left, box(plot).right]),
    cut: plots.flatMap((plot) => outside(plot).map((text) => text.textContent)),
    cells: [...page.querySelectorAll('td, th')].filter(shown).map((cell) => cell.textContent),
    colors: [style(page.body).backgroundColor, style(page.body).color],
  };
});
const out = document.createElement('pre');
out.id = 'facts';
out.textContent = JSON.stringify(facts);
document.body.replaceChildren(out);
"""


def measured(text, folder, scheme):
    """What a browser makes of the page: one dictionary a width."""
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{html.escape(text)}"></iframe>' for width in WIDTHS)
    around = folder / f"{scheme}.html"
    around.write_text(
        f"<!doctype html><style>iframe {{ border: 0 }}</style>{frames}<script>onload = () => {{ {MEASURE} }}</script>",
        encoding="utf-8",
    )
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1800,1000"]
    command += [f"--user-data-dir={folder / scheme}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    done = subprocess.run(
        [*command, "--dump-dom", around.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(html.unescape(done.stdout.split('id="facts">')[1].split("</pre>")[0]))


def luminance(color):
    """Relative luminance of rgb(r, g, b), as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_every_plot_and_number_is_visible_at_every_width_and_in_both_schemes(make_config, filled, tmp_path):  # noqa: F811
    data = read_report_data(filled, slices=200)
    text = render(sections(data), tiles(data), make_config(), slices=200)
    page = Page(text)
    # Each plot is there twice, wide and narrow, and one of them is shown.
    plots = sorted({label for labels in page.plots.values() for label in labels})
    cells = [cell for rows in page.tables.values() for row in rows for cell in row]
    for scheme in SCHEMES:
        for facts in measured(text, tmp_path, scheme):
            assert sorted(label for label, _, _ in facts["plots"]) == plots
            assert facts["cells"] == cells
            assert facts["needed"] <= facts["width"], "the page itself must not scroll sideways"
            assert all(0 <= left < right <= facts["width"] for _, left, right in facts["plots"])
            assert facts["cut"] == []
            behind, before = map(luminance, facts["colors"])
            assert (behind < before) == (scheme == "dark")
            assert (max(behind, before) + 0.05) / (min(behind, before) + 0.05) > 7  # WCAG AAA
