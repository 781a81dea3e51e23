"The player in a real browser: its controls, what it says, what it draws of random runs, and how long that takes."
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from test_trace import RUNS, random_run

from pagedlm.core import ConfigError, Request, SamplingParams
from pagedlm.figures.batch import hues, slot_hues
from pagedlm.figures.frames import Film, film, go_on
from pagedlm.figures.player import player, script, style, views
from pagedlm.memory.block_manager import BlockManager
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace, replay

sync_api = pytest.importorskip('playwright.sync_api', reason='playwright is not here: pip install playwright')
each_view = pytest.mark.parametrize('view', views)


def serve(requests, policy='continuous', seats=4, swap=0, steps=None, gap=0.02, **params):
    executor = ScriptedExecutor(num_blocks=40, block_size=4, num_swap_blocks=swap)
    engine = Engine(Scheduler(BlockManager(40, 4, swap), seats, 24, 64, policy), executor, Trace('full'), clock=None)
    line = [Request(f'r{i}', [1 + i % 7] * (3 + 5 * i % 17), SamplingParams(max_tokens=4 + 7 * i % 19, **params), gap * i) for i in range(requests)]
    while (line or engine.has_unfinished) and len(engine.trace) != steps:
        while line and line[0].arrival <= engine.now + 1e-9: engine.add(line.pop(0))
        engine.step()
    return engine.trace


@pytest.fixture(scope='module')
def browser():
    path = shutil.which('chromium')
    with sync_api.sync_playwright() as p:
        if not path and not Path(p.chromium.executable_path).exists():
            pytest.skip('no chromium here: install it (Debian: apt install chromium) to test the player')
        browser = p.chromium.launch(executable_path=path, args=['--no-sandbox', '--disable-gpu', '--disable-background-networking'])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    "visit(HTML or Player, **context) -> page. At the end nothing must have been complained of, and nobody but files asked."
    contexts, faults = [], []
    def visit(what, width=900, **options):
        path = tmp_path/f'{len(contexts)}.html'
        if isinstance(what, str): path.write_text(f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>t</title>{what}', encoding='utf-8')
        else: what.save(path)
        contexts.append(browser.new_context(viewport=dict(width=width, height=800), **options))
        page = contexts[-1].new_page()
        page.on('console', lambda m: faults.append(m.text) if m.type in ('error', 'warning') else None)
        page.on('pageerror', lambda e: faults.append(str(e)))
        page.on('request', lambda r: faults.append(r.url) if not r.url.startswith('file:') else None)
        page.goto(path.as_uri())
        return page
    yield visit
    for context in contexts: context.close()
    assert not faults, faults


def bare(*films, view='batch', **options):
    "A page in which a test holds the player's handle, `h`."
    return (f'<style>{style()}</style><div id="here"></div><script>{script(view)}\n'
            f'const h = pagedlm.mount(document.getElementById("here"), {json.dumps([f if isinstance(f, dict) else f.to_dict() for f in films])}, '
            f'{json.dumps(dict(view=view, **options))});</script>')


def now(page) -> int: return int(page.locator('input[type=range]').input_value())
def press(page, name): page.get_by_role('button', name=name, exact=True).click()


def test_controls(visit):
    trace = serve(8)
    page, last = visit(player(trace, title='A & B <i>')), len(trace) - 1
    assert page.title() == 'A & B <i>' == page.get_by_role('heading', level=1).text_content() and page.locator('.title').count() == 0
    said, picture = page.locator('.said'), page.get_by_role('img')
    assert now(page) == 0 and said.get_attribute('aria-live') == 'polite'
    press(page, 'Step forward'); press(page, 'Step forward'); press(page, 'Step back')
    told = film(trace).frames[1]['said']
    assert now(page) == 1 and said.text_content() == told and told in picture.get_attribute('aria-label')
    assert page.locator('.where').text_content() == page.locator('input').evaluate('e => e.ariaValueText') == f'iteration 1 of {last}'
    press(page, 'Last iteration')
    assert now(page) == last
    press(page, 'First iteration')
    for _ in range(3): press(page, 'Faster')
    assert page.locator('.rate').text_content() == '32 / s'
    press(page, 'Play')
    assert said.get_attribute('aria-live') == 'off'                     # nobody can listen that fast
    page.wait_for_function("document.querySelector('input').value > 2")
    press(page, 'Pause')
    stopped = now(page)
    page.wait_for_timeout(120)
    assert 2 < stopped == now(page) and said.get_attribute('aria-live') == 'polite' and page.get_by_role('button', name='Play').count() == 1
    press(page, 'Play')
    page.wait_for_function(f"document.querySelector('input').value == {last}")
    page.get_by_role('button', name='Play').wait_for()                  # it has stopped at the end
    press(page, 'Play')                                                 # and begins anew
    page.wait_for_function(f"document.querySelector('input').value < {last}")


def test_keyboard_and_scrubber(visit):
    trace = serve(8)
    page, last = visit(player(trace)), len(trace) - 1
    page.get_by_role('img').click()                                     # a click on the picture is enough
    for key, want in (('ArrowRight', 1), ('ArrowRight', 2), ('ArrowLeft', 1), ('End', last), ('ArrowRight', last), ('Home', 0), ('ArrowLeft', 0)):
        page.keyboard.press(key)
        assert now(page) == want, key
    page.keyboard.press('+'); page.keyboard.press('+'); page.keyboard.press('-')
    assert page.locator('.rate').text_content() == '8 / s'
    page.keyboard.press('Space')
    page.wait_for_function("document.querySelector('input').value > 0")
    page.keyboard.press('Space')
    assert page.get_by_role('button', name='Play').count() == 1
    page.locator('input').fill('5')
    assert now(page) == 5 and page.locator('.said').text_content() == film(trace).frames[5]['said']
    page.keyboard.press('ArrowRight')                                   # in the scrubber: one step, not two
    assert now(page) == 6
    names = []
    page.get_by_role('button', name='First iteration').focus()
    for _ in range(8):
        names.append(page.evaluate("document.activeElement.ariaLabel"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == 'solid'
        page.keyboard.press('Tab')
    assert names == ['First iteration', 'Step back', 'Play', 'Step forward', 'Last iteration', 'Slower', 'Faster', 'Iteration']
    page.get_by_role('button', name='Step back').focus()
    page.keyboard.press('Space')                                        # of a button, its own
    assert now(page) == 5 and page.get_by_role('button', name='Play').count() == 1


def test_autoplay_asks_the_reader_first(visit):
    show = player(serve(8), autoplay=True, speed=32)
    page = visit(show)
    page.wait_for_function("document.querySelector('input').value > 3")
    page = visit(show, reduced_motion='reduce')
    page.wait_for_timeout(200)
    assert now(page) == 0
    press(page, 'Play')                                                 # who asks for it gets it
    page.wait_for_function("document.querySelector('input').value > 3")
    page = visit('<div style="height: 3000px"></div>' + show._repr_html_())
    page.wait_for_timeout(200)
    assert now(page) == 0                                               # out of sight
    page.get_by_role('img').scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('input').value > 3")


def test_two_players_on_one_page(visit):
    a, b = player(serve(8), speed=32), player(serve(5, 'static'), view='batch')
    page = visit('<meta name="viewport" content="width=device-width">' + a._repr_html_() + b._repr_html_() + a._repr_html_())
    for i, (x, n) in enumerate(zip((a, b, a), (3, 2, 1))):
        for _ in range(n): page.get_by_role('button', name='Step forward').nth(i).click()
    assert [int(e.input_value()) for e in page.locator('input').all()] == [3, 2, 1]
    assert [e.text_content() for e in page.locator('.said').all()] == [x.films[0].frames[n]['said'] for x, n in ((a, 3), (b, 2), (a, 1))]
    assert not page.evaluate("document.querySelectorAll('[id]').length")
    assert a._repr_html_() == player(serve(8), speed=32)._repr_html_() != b._repr_html_()


def test_in_a_notebook(visit):
    "As JupyterLab shows HTML: set into a node that is on no page yet, scripts made anew, and then put on the page; the same output may be shown twice."
    output = json.dumps(player(serve(8))._repr_html_()).replace('<', '\\u003c')
    page = visit(f'''<body data-jp-theme-light="true"><script>for (const view of [1, 2]) {{
        const node = document.createElement('div');
        node.innerHTML = {output};
        for (const old of node.querySelectorAll('script')) {{
            const script = document.createElement('script');
            for (const a of old.attributes) script.setAttribute(a.name, a.value);
            script.textContent = old.textContent;
            old.replaceWith(script);
        }}
        document.body.append(node);
    }}</script>''')
    page.get_by_role('button', name='Step forward').nth(1).click()
    assert [int(e.input_value()) for e in page.locator('input').all()] == [0, 1]
    assert page.get_by_role('img').count() == 2 and page.locator('[data-lm-suppress-shortcuts=true]').count() == 2


def test_beside_each_other(visit):
    static, continuous = serve(8, 'static'), serve(8)
    page = visit(player(static, beside=continuous), width=1300)
    boxes = [e.bounding_box() for e in page.get_by_role('img').all()]
    assert boxes[0]['y'] == boxes[1]['y'] and boxes[1]['x'] > boxes[0]['x'] + boxes[0]['width']
    page.keyboard.press('Tab'); page.keyboard.press('End')
    assert now(page) == len(static) - 1 > len(continuous)
    said = page.locator('.said').all_text_contents()
    assert said == [film(static).frames[-1]['said'], f'It has ended. {film(continuous).frames[-1]["said"]}']
    facts = page.locator('.facts').all_text_contents()
    for trace, words in zip((static, continuous), facts):
        idle, tokens = 4 * len(trace) - int(trace['num_chunks'].sum()), sum(len(p.due) for p in trace.plans)
        assert f'tokens so far {tokens}' in words and f'idle seats so far {idle} of {4 * len(trace)}' in words


@each_view
def test_on_a_phone(visit, view):
    static, continuous = serve(8, 'static', swap=8, n=2), serve(8, swap=8, n=2)
    page = visit(player(static, view, beside=continuous), width=360, color_scheme='dark', has_touch=True)
    for f in 0, 12, 25:
        page.locator('input').first.fill(str(f))
        assert page.evaluate('document.documentElement.scrollWidth') <= 360
        assert page.get_by_text('after it:').count() == 2 * (view != 'sharing')         # what is counted then, not in the iteration
        for e in page.get_by_role('img').all():
            right = e.evaluate("e => Math.max(...[...e.querySelectorAll('text')].map(t => t.getBoundingClientRect().right)) - e.getBoundingClientRect().right")
            assert right <= 1, (f, right)                               # no word is cut
    for e in page.locator('button, input').all(): assert min(e.bounding_box()[k] for k in ('width', 'height')) >= 32


@each_view
def test_long_ids(visit, view):
    "Ids of 150 characters make no page scroll sideways, wherever they stand."
    trace, long = serve(4), lambda name: name + 'x' * 150
    told = json.loads(re.sub(r'\br(\d)\b', lambda m: long(m[0]), json.dumps(film(trace).to_dict())))
    head = {k: v for k, v in told.items() if k not in ('requests', 'seqs', 'frames')} | {'title': long('title')}
    shown = Film(head, told['requests'], told['seqs'], told['frames'])
    for page in visit(player(shown, view, title=long('title')), width=360), visit(bare(shown, view=view, title=long('title')), width=360):
        assert long('r0') in page.locator('.said').text_content()
        assert page.evaluate('document.documentElement.scrollWidth') <= 360
        assert page.evaluate('Math.max(...[...document.querySelectorAll("div, h1")].map(e => e.scrollWidth - e.clientWidth))') <= 0


def test_an_abort_has_its_mark(visit):
    "A dagger at the left edge of the iteration: in the seat of each sequence, or in the line where the request stood."
    engine = Engine(Scheduler(BlockManager(40, 4), 2, 24, 64), ScriptedExecutor(num_blocks=40, block_size=4), Trace('full'), clock=None)
    for name, n in ('a', 2), ('b', 1): engine.add(Request(name, [1] * 5, SamplingParams(n=n, max_tokens=9)))
    for name in None, None, 'b', 'a':
        if name: engine.abort(name)
        engine.step()
    page = visit(player(engine.trace))
    marks = lambda: [m for e in page.locator('svg[role=img] .dagger').all() for m in re.findall(r'M[\d.]+ [\d.]+', e.get_attribute('d'))]
    assert marks() == [] and page.locator('.legend').get_by_text('aborted').count() == 1
    for f, n in (1, 0), (2, 1), (3, 3):
        page.locator('input').fill(str(f))
        assert len(set(marks())) == n, f


def luminance(rgb): return sum(w * (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), rgb))
def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@each_view
def test_text_can_be_read(visit, view):
    page = visit(player(serve(8, swap=8), view))
    page.locator('input').fill('9')
    for scheme, paper in (('light', (1, 1, 1)), ('dark', (0.07, 0.07, 0.07))):
        page.emulate_media(color_scheme=scheme)
        inks = page.evaluate("""() => [...document.querySelectorAll('.pagedlm .said, .pagedlm .where, .pagedlm .facts span, .pagedlm .legend span')].map(e => getComputedStyle(e).color)
            .concat([...document.querySelectorAll('.pagedlm svg text:not([style]):not([fill])')].map(e => getComputedStyle(e).fill))""")
        for ink in set(inks):
            numbers = [float(x) for x in re.findall(r'[\d.]+', ink.replace('srgb', ''))]
            rgb, alpha = [x / (1 if 'srgb' in ink else 255) for x in numbers[:3]], numbers[3] if len(numbers) > 3 else 1
            assert contrast([alpha * c + (1 - alpha) * p for c, p in zip(rgb, paper)], paper) >= 4.5, (scheme, ink)


def test_colours(visit):
    colours = visit(bare(film(serve(1)))).evaluate('[0, 1, 2, 3, 4, 5, 6].map(i => [pagedlm.colour(i), pagedlm.ink(i)])')
    assert [c for c, _ in colours] == [*hues, hues[0]]                  # those of the other figures
    rgb = lambda x: [int(x[1:][i:i + len(x) // 3], 16) / (255 if len(x) == 7 else 15) for i in range(0, len(x) - 1, len(x) // 3)]
    for fill, ink in colours: assert contrast(rgb(fill), rgb(ink)) >= 4.5, fill


def test_states_and_pictures_of_random_runs(visit):
    "At frames in random order, in every view: the tables that the trace replays, who holds what, and in the batch one box per chunk."
    rng = np.random.default_rng(0)
    for run in RUNS[::13]:
        trace = random_run(*run)[0].trace
        shown = film(trace)
        page, ids, size = visit(bare(shown, view='paging')), [s['id'] for s in shown.seqs], shown.head['block_size']
        tables = [{s: list(t) for s, t in tables.items()} for _, tables in replay(trace)]
        rows = []
        for frame in shown.frames: rows.append(frame['rows'] if 'rows' in frame else go_on(rows[-1]))
        order = [len(tables) - 1, 0, *rng.integers(0, len(tables), 6).tolist()]
        for view, f in [(view, f) for view in views for f in order]:
            if f == order[0]: page.evaluate('view => { h.destroy(); window.p = pagedlm.mount(here, [h.films[0]], {view}) }', view)
            state = page.evaluate("""f => { p.show(f); const s = p.films[0].state(f); return {tables: [...s.tables], holders: [...s.holders], fill: [...s.fill], rows: s.rows,
                boxes: ['prefill', 'decode'].map(k => [...document.querySelectorAll('path.' + k)].map(p => p.getAttribute('d').split('M').length - 1).reduce((a, b) => a + b, 0))} }""", f)
            assert state['rows'] == rows[f]
            assert {ids[s]: t for s, t in state['tables']} == tables[f], (run, f)
            held, filled, stops = {}, {}, {r[0]: r[4] for r in rows[f]}
            for s, t in state['tables']:
                for j, b in enumerate(t):
                    if b < 0: continue
                    held.setdefault(b, []).append(s)
                    filled[b] = max(filled.get(b, 0), min(max(stops.get(s, 0) - j * size, 0), size))
            assert dict(state['holders']) == held and dict(state['fill']) == filled
            if view == 'batch':
                window = page.evaluate("f => Math.min(f + 1, Math.floor((document.querySelector('[role=img]').clientWidth - 22 - 190) / "
                                       "Math.min(24, Math.max(8, (document.querySelector('[role=img]').clientWidth - 22 - 190) / p.films[0].frames.length))))", f)
                assert sum(state['boxes']) == trace['num_chunks'][f + 1 - window:f + 1].sum(), (run, f)


def test_ten_thousand_iterations(visit):
    trace = serve(2600, steps=10_000, gap=0.04)
    shown, rng = film(trace), np.random.default_rng(0)
    with pytest.raises(ConfigError) as e: player(shown)
    first, last = map(int, re.search(r'first=(\d+), last=(\d+)', str(e.value)).groups())
    assert first == 0 and len(player(trace, first=first, last=last).films[0].frames) == last > 2000       # what it says is true
    page = visit(bare(shown, view='paging'))
    cdp = page.context.new_cdp_session(page)
    cdp.send('Performance.enable', {'timeDomain': 'threadTicks'})       # the page's own time, whoever else is busy
    spent = lambda: next(m['value'] for m in cdp.send('Performance.getMetrics')['metrics'] if m['name'] == 'TaskDuration')
    for view in views:
        page.evaluate('view => { window.p?.destroy(); h.destroy(); window.p = pagedlm.mount(here, [h.films[0]], {view}) }', view)
        for frames in range(9000, 9015), rng.integers(0, 10_000, 15).tolist():
            times = []
            for f in frames:
                before = spent()
                page.evaluate('f => { p.show(f); document.body.offsetHeight }', f)
                times.append(spent() - before)
            assert sorted(times)[7] < 0.03, (view, times)


def test_a_film_that_grows(visit):
    trace = serve(12, steps=40)
    whole = film(trace).to_dict()
    empty = {**whole, 'requests': [], 'seqs': [], 'frames': []}
    page = visit(bare(empty))                                           # an engine that has not stepped
    assert page.locator('.where').text_content() == 'iteration 0 of 0'
    page.evaluate('part => h.append(part)', {**whole, 'frames': whole['frames'][:30]})
    assert now(page) == 29
    page.evaluate('part => h.append(part, 10)', dict(frames=whole['frames'][30:36], requests=[{**whole['requests'][0], 'number': 0}]))
    assert now(page) == 9 and page.locator('.where').text_content() == 'iteration 35 of 35'        # it follows, and keeps ten
    press(page, 'Step back')
    page.evaluate('part => h.append(part, 10)', dict(frames=whole['frames'][36:38]))
    assert page.locator('.where').text_content() == 'iteration 34 of 37'                           # who looks back is left in peace
    states = page.evaluate('[3, 0, 9].map(f => [...h.films[0].state(f).tables])')
    replayed = [{s: list(t) for s, t in tables.items()} for _, tables in replay(trace)]
    assert [{whole['seqs'][s]['id']: t for s, t in tables} for tables in states] == [replayed[i] for i in (31, 28, 37)]
    assert page.evaluate('h.films[0].requests.length') == 12
    page.evaluate('h.destroy()')
    assert page.locator('#here *').count() == 0


def test_lines_can_be_read():
    for path in (ROOT/'pagedlm'/'figures').glob('*.[jc]s*'):
        long = [i for i, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1) if len(line) > 140]
        assert not long, (path.name, long)


def test_what_it_refuses():
    trace = serve(3)
    for what, why in ((lambda: player(Trace('requests')), 'level'), (lambda: player(trace, 'slots'), 'batch, paging, sharing'),
                      (lambda: player(trace, beside=serve(4)), 'same requests'), (lambda: player(trace, speed=0), '256'),
                      (lambda: player(trace, first=99), f'iterations 0 to {len(trace) - 1}'), (lambda: player(trace, first=5, last=3), '0 to'),
                      (lambda: player(serve(0)), 'run its engine'), (lambda: player(None), 'NoneType'), (lambda: player([trace]), 'list'),
                      (lambda: player(trace, beside=3), 'int'), (lambda: player(trace, speed='fast'), "'fast'"),
                      (lambda: player(trace, first='a'), "first='a'"), (lambda: player(trace, title=3), 'title=3')):
        with pytest.raises(ConfigError, match=why): what()
    named = player(Film(film(trace).head, [{**r, 'id': '</script><b>' + r['id']} for r in film(trace).requests], film(trace).seqs, film(trace).frames))
    assert '</script><b>' not in named._repr_html_()
    assert set(slot_hues.values()) <= set(re.findall(r'#[0-9A-F]{6}', script()))
