"The docs site, built once and read in a real browser that can reach nothing else: every page, in light and dark, at a desk and on a phone."
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from conftest import ROOT

import pagedlm

NOTEBOOKS = {re.sub(r'^\d+[a-zA-Z0-9]*_', '', p.stem.lower()): p for p in sorted((ROOT/'nbs').glob('[!_.]*.ipynb'))}
PAGES = [*NOTEBOOKS, 'names', 'search']
MAIN = ['index', 'names', 'prefix_cache', 'frames', 'player', 'explorer']       # looked at by all rules of WCAG A and AA; the others for contrast
each_page = pytest.mark.parametrize('name', PAGES)


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp('site')/'_docs'
    done = subprocess.run([sys.executable, ROOT/'tools'/'docs.py', '--out', out], cwd=ROOT, capture_output=True, text=True)
    if 'needs npm' in done.stderr and not os.environ.get('CI_NEEDS_BROWSER'): pytest.skip(done.stderr.strip())
    if done.returncode: pytest.fail(f'the site was not built:\n{(done.stdout + done.stderr)[-6000:]}', pytrace=False)
    return out


# what needs no browser

class Document(HTMLParser):
    "Of one page: its anchors, links, what it loads by itself, and the text of its article."
    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.loads, self.words, self.within = set(), [], [], [], []
        self.feed(path.read_text(encoding='utf-8'))
        self.text = ' '.join(self.words)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get('id'): self.ids.add(attrs['id'])
        if tag == 'a' and attrs.get('href'): self.links.append(attrs['href'])
        if tag == 'link' and attrs.get('rel') in ('stylesheet', 'icon', 'preload'): self.loads.append(attrs['href'])
        if tag in ('script', 'img', 'iframe', 'source', 'video') and attrs.get('src'): self.loads.append(attrs['src'])
        if tag in ('article', 'script', 'style'): self.within.append(tag)

    def handle_endtag(self, tag):
        if tag in ('article', 'script', 'style'): self.within.pop()

    def handle_data(self, data):
        if self.within == ['article']: self.words.append(data)


@pytest.fixture(scope='module')
def documents(site) -> dict[str, Document]:
    return {p.stem: Document(p) for p in site.glob('*.html')}


def test_every_notebook_is_a_page(documents):
    assert documents.keys() == set(PAGES)


def test_every_link_and_anchor_resolves(site, documents):
    broken = []
    for name, page in documents.items():
        for link in {*page.links, *page.loads}:
            url, anchor = urldefrag(link)
            if urlparse(url).scheme:
                if link in page.loads and not link.startswith('data:'): broken.append(f'{name} loads {link}')
                continue
            target = site/unquote(urlparse(url).path) if url else site/f'{name}.html'
            if not target.is_file(): broken.append(f'{name}: {link}')
            elif anchor and target.suffix == '.html' and unquote(anchor) not in documents[target.stem].ids: broken.append(f'{name}: {link}')
    assert not broken, broken


def test_prose_leads_to_definitions(documents):
    assert 'block_table.html#blocktable' in {link.lower() for link in documents['names'].links}
    for name, anchor in ('prefix_cache', 'prefixcache.find'), ('block_table', 'blocktable.slot'), ('engine', 'engine.step'):
        assert anchor in documents[name].ids       # nbdev's own, so that other projects' links work
    linked = {link for name in NOTEBOOKS for link in documents[name].links if re.search(r'\.html#\w+\.?\w+$', link)}
    assert len(linked) > 20


def test_names_has_all_that_the_package_offers(documents):
    words = set(re.findall(r'\w+', documents['names'].text))
    assert set(pagedlm.__all__) <= words


def squeezed(text: str) -> str: return re.sub(r'\s', '', text)


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_nothing_of_the_workshop_is_seen(name, documents):
    text = squeezed(documents[name].text)
    assert '#|' not in text and 'default_exp' not in text
    cells = json.loads(NOTEBOOKS[name].read_text(encoding='utf-8'))['cells']
    for source in (''.join(c['source']) for c in cells if c['cell_type'] == 'code'):
        code = squeezed(''.join(line for line in source.splitlines() if not line.startswith('#|')))
        if re.search(r'^#\|\s*(hide|hide_input|echo: false|include: false)\s*$', source, re.M): assert code not in text, source
        elif not re.search(r'^#\|\s*(export|default_exp|code-fold)', source, re.M) and not re.search('^ *%', source, re.M): assert code in text, source


@each_page
def test_no_error_is_shown(name, documents, site):
    "Of a cell, of nbdev's processors, of Sphinx; what pagedlm refuses is printed on purpose, and in one line."
    assert not re.findall(r"Traceback.{0,40}|Errorin(?:notebook|cell).{0,40}|name'\w+'isnotdefined|show_doc\(.{0,20}", squeezed(documents[name].text))
    assert not re.findall('class="(?:output traceback|system-message|problematic).{0,60}', (site/f'{name}.html').read_text(encoding='utf-8'))


def test_pages_are_small(site):
    assert max((p.stat().st_size, p.name) for p in site.glob('*.html'))[0] < 3_000_000


# what needs one

@pytest.fixture(scope='module')
def browser():
    chromium = shutil.which('chromium')
    if not chromium:
        why = 'chromium is not here: install it (Debian: apt install chromium) to test the site'
        pytest.fail(why) if os.environ.get('CI_NEEDS_BROWSER') == '1' else pytest.skip(why)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=['--no-sandbox', '--disable-gpu', '--disable-background-networking'])
        yield browser
        browser.close()


@pytest.fixture(scope='module')
def url(site):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


@pytest.fixture(scope='module')
def tab(browser, url):
    "One page of the browser for all tests; what goes wrong in it is in `tab.wrong`."
    tab = browser.new_page(base_url=url)
    tab.wrong = []
    tab.route(lambda u: not u.startswith(url), lambda route: (tab.wrong.append(f'asks for {route.request.url}'), route.abort()))
    tab.on('response', lambda r: r.status >= 400 and tab.wrong.append(f'{r.status} {r.url}'))
    tab.on('requestfailed', lambda r: tab.wrong.append(f'failed: {r.url}'))
    tab.on('pageerror', lambda e: tab.wrong.append(str(e)))
    tab.on('console', lambda m: m.type == 'error' and tab.wrong.append(m.text))
    return tab


@pytest.fixture
def page(tab):
    tab.goto('about:blank')         # what the test before has asked for is given up now
    tab.wrong.clear()
    tab.set_viewport_size({'width': 1280, 'height': 800})
    tab.emulate_media(color_scheme='light')
    yield tab
    assert not tab.wrong, tab.wrong


@pytest.fixture(scope='module')
def axe() -> str:
    sys.path.insert(0, str(ROOT/'tools'))
    import docs
    return docs.asset('axe.min.js').read_text(encoding='utf-8')


def faults(page, rules: dict | list[str]) -> list[str]:
    "What axe finds; ipywidgets' sliders have no name, and are not ours."
    found = page.evaluate("rules => axe.run({exclude: ['.noUi-handle']}, {runOnly: rules, resultTypes: ['violations']})", rules)
    return [f"{v['id']}: {n['target']} {n['html'][:120]} {n['failureSummary'].splitlines()[-1]}" for v in found['violations'] for n in v['nodes'][:3]]


@each_page
def test_page_reads_well(name, page, axe):
    "No error, nothing from elsewhere, no sideways scroll on a phone, enough contrast in light and in dark."
    page.set_viewport_size({'width': 360, 'height': 740})
    page.goto(f'/{name}.html', wait_until='load')
    wide = page.evaluate('''() => [document.documentElement, document.body, document.querySelector('.content')]
        .filter(e => e.scrollWidth > Math.max(e.clientWidth, 1)).map(e => `${e.tagName}.${e.className}: ${e.scrollWidth} > ${e.clientWidth}`)''')
    assert not wide, wide
    page.set_viewport_size({'width': 1280, 'height': 800})
    page.evaluate(axe)
    rules = {'type': 'tag', 'values': ['wcag2a', 'wcag2aa', 'wcag21aa']} if name in MAIN else ['color-contrast']
    if name not in MAIN: page.evaluate("document.querySelectorAll('pre, aside, header').forEach(e => e.remove())")    # alike on all pages, and slow to check
    schemes = ['light', 'dark'] if name in MAIN else [('light', 'dark')[PAGES.index(name) % 2]]     # all look alike: time is better spent elsewhere
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        assert not (bad := faults(page, rules)), (scheme, bad)


def test_contrast_would_be_missed(page, axe):
    page.goto('/index.html')
    page.evaluate(axe)
    page.add_style_tag(content='article p { color: #bbb !important; }')
    assert 'color-contrast' in str(faults(page, ['color-contrast']))


def test_search_finds(page):
    page.goto('/search.html?q=copy-on-write')
    page.wait_for_selector('ul.search li a')
    assert 'Copy-on-write' in page.inner_text('ul.search')


def test_light_and_dark_can_be_switched(page):
    page.goto('/index.html')
    background = lambda: page.evaluate('getComputedStyle(document.body).backgroundColor')
    seen = set()
    for _ in range(3): page.locator('.theme-toggle:visible').first.click(); seen.add(background())
    assert len(seen) == 2


def test_code_can_be_copied(page):
    page.goto('/prefix_cache.html')
    assert page.locator('button.copybtn').count() > 10


def test_solutions_and_sources_are_folded(page):
    page.goto('/prefix_cache.html')
    folds = page.locator('details.hide')
    assert folds.count() > 3 and not folds.evaluate_all('all => all.filter(d => d.open).length')
    code = folds.filter(has_text='class PrefixCache').first
    assert not code.locator('pre').is_visible()
    code.locator('summary').click()
    assert code.locator('pre').is_visible()


def test_formulas_are_drawn(page):
    page.goto('/workloads.html')
    assert page.locator('math[display=block]').bounding_box()['height'] > 15 and page.locator('math').count() > 4


def test_player_plays_pauses_and_steps(page):
    page.goto('/player.html')
    player = page.get_by_role('group', name=re.compile('^Player')).first
    player.scroll_into_view_if_needed()
    at = lambda: player.locator('input[type=range]').input_value()
    press = lambda name: player.get_by_role('button', name=name, exact=True).click()
    if player.get_by_role('button', name='Pause', exact=True).count(): press('Pause')
    press('First iteration')
    assert at() == '0' and player.locator('svg[role=img]').first.get_attribute('aria-label')
    press('Step forward'); press('Step forward')
    assert at() == '2'
    press('Step back')
    assert at() == '1'
    before = player.locator('svg[role=img]').first.inner_html()
    press('Play')
    page.wait_for_function('e => +e.value > 2', arg=player.locator('input[type=range]').element_handle())
    press('Pause')
    stopped = at()
    page.wait_for_timeout(700)
    assert at() == stopped and player.locator('svg[role=img]').first.inner_html() != before


def test_explorer_shows_its_widgets(page):
    page.goto('/explorer.html')
    page.wait_for_selector('.jupyter-widgets button')
    assert page.locator('.jupyter-widgets svg[role=img]').count()


def test_cheat_sheet_prints_on_one_page(page):
    page.goto('/cheat_sheet.html')
    paper = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb'/Type\s*/Page[^s]', paper)) == 1
