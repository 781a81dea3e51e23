"The pictures of the memory, in a browser: what stands in the SVG is what films and traces say."
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from pagedlm.core import Request, SamplingParams
from pagedlm.figures.frames import film
from pagedlm.figures.player import script, style
from pagedlm.memory.block_manager import BlockManager
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace

playwright = pytest.importorskip('playwright.sync_api')

PAGE = """<!DOCTYPE html><meta name="viewport" content="width=device-width"><style>:root {{ color-scheme: light dark; }} {style}
body {{ margin: 8px; background: light-dark(#fff, #131416); color: light-dark(#000, #cfd0d0); }}</style>
<div id="here"></div><script>{script}</script>"""


@pytest.fixture(scope='module')
def browser():
    with playwright.sync_playwright() as p:
        path = shutil.which('chromium')
        if not path and not Path(p.chromium.executable_path).exists(): pytest.skip('there is no Chromium here')
        browser = p.chromium.launch(executable_path=path, args=['--no-sandbox', '--disable-gpu', '--disable-background-networking'])
        yield browser
        browser.close()


@pytest.fixture
def show(browser):
    "f(films, view, width, dark): a page that plays them, its player `h`; an error on it fails the test."
    pages, errors = [], []

    def show(films, view, width=900, dark=False):
        page = browser.new_page(viewport=dict(width=width, height=600), color_scheme='dark' if dark else 'light')
        pages.append(page)
        page.on('pageerror', lambda e: errors.append(str(e)))
        page.set_content(PAGE.format(style=style(), script=script(view)))
        page.evaluate('([films, view]) => { window.h = pagedlm.mount(document.getElementById("here"), films, {view}) }', [films, view])
        return page

    yield show
    for page in pages: page.close()
    assert not errors, errors


# ---- runs

def run(memory, arrivals, seats=6, budget=32, max_len=64, preemption='auto', policy='continuous', most=300, **options):
    "The trace of requests that come at iterations: [(iteration, request)]."
    engine = Engine(Scheduler(memory, seats, budget, max_len, policy, preemption, **options), ScriptedExecutor(), Trace('full'), clock=None)
    arrivals = list(arrivals)
    while arrivals or engine.has_unfinished:
        while arrivals and arrivals[0][0] <= engine.scheduler.iteration: engine.add(arrivals.pop(0)[1])
        engine.step()
        assert engine.scheduler.iteration < most
    return engine.trace

def crowd(seed, n=9, samples=(1, 1, 3), **params):
    "Random requests, the first of whose tokens are the same for all."
    rng = np.random.default_rng(seed)
    for i in range(n):
        prompt = np.r_[np.arange(8), rng.integers(100, 999, rng.integers(1, 12))]
        yield 2 * i, Request(f'r{i}', prompt, SamplingParams(n=int(rng.choice(samples)), max_tokens=int(rng.integers(3, 16)), **params))

RUNS = {
    'swap': lambda: run(BlockManager(18, 4, 14), crowd(1), preemption='swap'),
    'recompute': lambda: run(BlockManager(18, 4), crowd(2), preemption='recompute'),
    'prefix': lambda: run(BlockManager(20, 4, 0, True), crowd(3), budget=12),
    'beams': lambda: run(BlockManager(40, 4), crowd(4, 3, (1,), beam_width=3, temperature=0), seats=8),
    'window': lambda: run(BlockManager(18, 4), crowd(5), window=10),
    'first_fit': lambda: run(ContiguousMemory(40, 2, 48, 'request'), crowd(6)),
    'buddy': lambda: run(ContiguousMemory(24, 4, 48, 'request', 'buddy'), crowd(7)),
}

@pytest.fixture(scope='module')
def runs(): return {name: (trace := make(), film(trace).to_dict()) for name, make in RUNS.items()}


def told(data):
    "For each frame, what it says by now: (tables, swap, cached, rows, gone), by number of sequence."
    tables, swap, cached, rows, gone = {}, {}, set(), [], {}
    for f in data['frames']:
        for now, key in (tables, 'tables'), (swap, 'swap'):
            for s, t in f.get(key, {}).items():
                if t is None: del now[int(s)]
                else: now[int(s)] = t
        cached = cached - {*f.get('cached', {}).get('drop', ())} | {*f.get('cached', {}).get('add', ())}
        rows = f['rows'] if 'rows' in f else [[s, seat, k, b, b + 1] if k == 1 else [s, seat, k, a, b] for s, seat, k, a, b in rows]
        gone = f.get('gone', gone)
        yield {**tables}, {**swap}, cached, rows, gone

def blocks_of(tables, stops, size):
    "{block: [holders, tokens]} of some tables."
    out = {}
    for s, table in tables.items():
        for j, b in enumerate(table):
            if b < 0: continue
            held = out.setdefault(b, [0, 0])
            held[0] += 1
            held[1] = max(held[1], min(max(stops.get(s, 0) - j * size, 0), size))
    return out

DRAWN = """f => {
    h.show(f);
    const all = (where, get) => [...document.querySelectorAll(where)].map(get), pair = text => text.split(' ').map(Number);
    const blocks = where => all(where + ' > [data-block]', e => [+e.dataset.block, +e.dataset.refs, +e.dataset.fill, e.dataset.state]);
    const names = ['entry', 'link', 'copy', 'out', 'in', 'fork', 'beam'];
    const marks = names.map(name => [name, all(`[data-${name}]`, e => pair(e.dataset[name]))]);
    return {...Object.fromEntries(marks), pool: blocks('.pool'), cpu: blocks('.cpu'), bands: blocks('.bands'),
        labels: all('.pool + g text', e => e.textContent), counts: all('.pool + g rect + text', e => +e.textContent),
        said: document.querySelector('svg[role=img]').ariaLabel,
        facts: Object.fromEntries(all('.facts > *', e => [e.textContent.replace(/ \\d.*/, ''), +e.querySelector('b').textContent]))}; }"""

def held(drawn): return {b: [refs, tokens] for b, refs, tokens, state in drawn if state == 'held'}
def some(trace, seed):
    "Frames in which blocks move, and some others."
    busy = [len(p.copies) + len(p.swap_outs) + len(p.swap_ins) > 0 for p in trace.plans]
    return [f for f, b in enumerate(busy) if b or random.Random(seed + f).random() < 0.25][:10]


# ---- what is drawn

@pytest.mark.parametrize('name', RUNS)
def test_blocks_tables_and_arrows(name, runs, show):
    trace, data = runs[name]
    page, size, num, frames, stops = show([data], 'paging'), data['block_size'], data['num_blocks'], some(trace, 0), {}
    old, links = {}, 0
    for f, (tables, swap, cached, rows, gone) in enumerate(told(data)):
        stops.update((s, stop) for s, _, _, _, stop in rows)
        new = {b for s, t in tables.items() for j, b in enumerate(t) if old.get(s, [])[j:j+1] != [b]}
        old = tables
        if f not in frames: continue
        plan, drawn, blocks = trace.plans[f], page.evaluate(DRAWN, f), blocks_of(tables, stops, size)
        assert {b for b, in drawn['link']} <= new, f
        links += len(drawn['link'])
        assert [b for b, *_ in drawn['pool']] == [*range(num)] and held(drawn['pool']) == blocks, f
        kinds = {kind: {b for b, _, _, state in drawn['pool'] if state == kind} for kind in ('cached', 'rounded', 'spare', 'short')}
        assert kinds['cached'] == cached - blocks.keys(), f
        for kind in 'rounded', 'spare', 'short': assert kinds[kind] == {*gone.get(kind, ())} - blocks.keys(), (kind, f)
        assert [b for b, *_ in drawn['cpu']] == [*range(data['num_swap_blocks'])]
        assert held(drawn['cpu']) == blocks_of(swap, stops, size), f
        assert {s for s, *_ in drawn['entry']} == tables.keys() and all(tables[s][j] == b for s, j, b in drawn['entry']), f
        if max(map(len, tables.values()), default=0) <= 9: assert len(drawn['entry']) == sum(map(len, tables.values())), f
        for mark, pairs in ('copy', plan.copies), ('out', plan.swap_outs), ('in', plan.swap_ins):
            assert sorted(drawn[mark]) == sorted(pairs.tolist()), (mark, f)
        assert {*map(str, range(num))} <= {*drawn['labels']}, f
        shared = sum(refs > 1 for refs, _ in blocks.values())
        assert f'{len(blocks)} of {num} blocks held' in drawn['said'], drawn['said']
        assert (f'{shared} shared' in drawn['said']) == (shared > 0), drawn['said']
    assert len(frames) > 5 and links


@pytest.mark.parametrize('name', ['swap', 'prefix', 'beams', 'first_fit'])
def test_shared_blocks_are_drawn_once(name, runs, show):
    trace, data = runs[name]
    page, size, frames, stops, most = show([data], 'sharing'), data['block_size'], some(trace, 1), {}, 0
    for f, (tables, _, _, rows, _) in enumerate(told(data)):
        stops.update((s, stop) for s, _, _, _, stop in rows)
        if f not in frames: continue
        plan, drawn, blocks = trace.plans[f], page.evaluate(DRAWN, f), blocks_of(tables, stops, size)
        assert len(drawn['bands']) == len(blocks) and {b: [r, n] for b, r, n, _ in drawn['bands']} == blocks, f
        assert held(drawn['pool']) == blocks and sorted(drawn['counts']) == sorted(refs for refs, _ in blocks.values()), f
        assert sorted(drawn['copy']) == sorted(plan.copies.tolist()), f
        for mark, pairs in ('beam', plan.beams), ('fork', plan.forks):
            ids = [[data['seqs'][s]['id'] for s in pair] for pair in drawn[mark]]
            assert sorted(ids) == sorted(pairs[:, :2].tolist()), (mark, f)
        saved = sum(refs for refs, _ in blocks.values()) - len(blocks)
        assert drawn['facts']['saved'] == saved and f': {saved} saved' in drawn['said'], f
        if data['memory'] == 'contiguous' and not len(plan.forks): assert saved == 0, f
        most = max(most, saved)
    assert most > 0


# ---- how it looks

CUT = """() => [...document.querySelectorAll('svg[role=img] text')].filter(text => {
  const {x, y, width, height} = text.getBBox(), {width: w, height: h} = text.ownerSVGElement;
  return text.textContent && (x < -1 || y < -2 || x + width > w.baseVal.value + 1 || y + height > h.baseVal.value + 3);
}).map(text => text.textContent)"""

CONTRAST = """() => {
  const context = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true}), low = [];
  const rgba = (colour, share = 1) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255 * share];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const page = rgba(getComputedStyle(document.body).backgroundColor).slice(0, 3);
  for (const svg of document.querySelectorAll('svg')) {
    const under = [];                                         // shapes that are drawn before a text, with their colours
    for (const e of svg.querySelectorAll('rect, path, text')) {
      const style = getComputedStyle(e), box = e.getBBox();
      if (e.tagName !== 'text') {
        if (style.fill !== 'none') under.push([e, rgba(style.fill, style.opacity * style.fillOpacity), box]);
        continue;
      }
      const at = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2);
      const inside = b => at.x >= b.x && at.x <= b.x + b.width && at.y >= b.y && at.y <= b.y + b.height;
      const here = ([shape, , box]) => inside(box) && shape.isPointInFill(at);
      const back = under.filter(here).reduce((below, [, colour]) => over(colour, below), page);
      const [a, b] = [light(over(rgba(style.fill), back)), light(back)].sort((p, q) => q - p);
      if ((a + 0.05) / (b + 0.05) < 4.5) low.push([e.textContent, (a + 0.05) / (b + 0.05)]);
    }
  }
  return low;
}"""

@pytest.mark.parametrize('width, dark', [(360, True), (900, False)], ids=['phone, dark', 'wide, light'])
@pytest.mark.parametrize('view', ['paging', 'sharing'])
def test_text_can_be_read(view, width, dark, runs, show):
    "No text is cut off, the page does not scroll sideways, and each text has a contrast of 4.5 with what it stands on."
    page = show([data for _, data in runs.values()], view, width, dark)
    for f in 2, 9, 21:
        page.evaluate('f => h.show(f)', f)
        assert page.evaluate('document.documentElement.scrollWidth') <= width
        assert page.evaluate(CUT) == [], f
        assert page.evaluate(CONTRAST) == [], f


OVERLAPS = """() => {
  const all = [...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text.dim.small')].filter(t => t.textContent).map(t => [t.textContent, t.getBBox()]);
    const boxes = [...svg.querySelectorAll('.pool > [data-block], .cpu > [data-block]')].map(e => ['block', e.getBBox()]);
    return texts.flatMap(([a, p], i) => [...texts.slice(i + 1), ...boxes].filter(([, q]) =>
      p.x + 1 < q.x + q.width && q.x + 1 < p.x + p.width && p.y + 2 < q.y + q.height && q.y + 2 < p.y + p.height).map(([b]) => [a, b]));
  });
  return all;
}"""

@pytest.mark.parametrize('view', ['paging', 'sharing'])
def test_headings_have_room(view, runs, show):
    for width in 360, 560, 600, 700, 900:
        page = show([data for _, data in runs.values()], view, width + 16)
        for f in 2, 9:
            page.evaluate('f => h.show(f)', f)
            assert page.evaluate(OVERLAPS) == [], (width, f)


def test_two_memories_have_one_scale(runs, show):
    requests = [(i, Request(f'r{i}', np.arange(6 + i), SamplingParams(max_tokens=5 + i))) for i in range(6)]
    films = [film(run(m, requests)).to_dict() for m in (ContiguousMemory(24, 4, 32), BlockManager(24, 4))]
    page = show(films, 'paging', 1200)
    page.evaluate('h.show(4)')
    places = page.eval_on_selector_all('svg[role=img]', """all => all.map(svg => [...svg.querySelectorAll('.pool > [data-block]')].map(e =>
        [e.getBBox().x, e.getBBox().y - svg.querySelector('.pool > [data-block]').getBBox().y]))""")
    assert places[0] == places[1] and len(places[0]) == 24


def test_a_film_that_grows(runs, show):
    "The picture after a film was appended to, and its old frames dropped, is the picture of the whole film."
    for name, start in ('swap', 20), ('prefix', 0):
        data = runs[name][1]
        n = len(data['frames'])
        whole, part = show([data], 'paging'), show([{**data, 'frames': data['frames'][:start]}], 'paging')
        for page in whole, part: page.evaluate('f => h.show(f)', n)
        for f in range(start, n, 5): part.evaluate('frames => h.append({frames}, 12)', data['frames'][f:f + 5])
        assert part.evaluate('h.films[0].frames.length') == min(12, n)
        assert part.inner_html('svg[role=img]') == whole.inner_html('svg[role=img]')


def test_a_large_pool_is_drawn_in_time(show):
    "In less than 50 ms of the browser's CPU time; how long that takes depends on who else is at work."
    rng = np.random.default_rng(0)
    requests = [(0, Request(f'r{i}', rng.integers(0, 999, rng.integers(150, 230)), SamplingParams(max_tokens=12))) for i in range(64)]
    data = film(run(BlockManager(1000, 16), requests, 64, 16384, 512)).to_dict()
    for view in 'paging', 'sharing':
        page = show([data], view, 1000)
        drawn = page.evaluate(DRAWN, 5)
        assert len(drawn['pool']) == 1000 and len(held(drawn['pool'])) > 700
        session = page.context.new_cdp_session(page)
        session.send('Performance.enable', {'timeDomain': 'threadTicks'})
        used = lambda: {m['name']: m['value'] for m in session.send('Performance.getMetrics')['metrics']}['ThreadTime']
        before = used()
        page.evaluate("""view => { for (let f = 1; f <= 10; f++)
            pagedlm.views[view].draw(pagedlm.el('svg'), h.films[0], f, {width: 1000, phone: false, length: 12}); }""", view)
        assert 0 < (used() - before) / 10 < 0.05
