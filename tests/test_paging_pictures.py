"Pictures of the memory, against the trace: what is drawn is what was held, at every width, and nothing is left open."
import matplotlib

matplotlib.use('agg')

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from pagedlm.core import ConfigError, Request, SamplingParams
from pagedlm.figures.batch import hues
from pagedlm.figures.paging import (block_kinds, compare_memory, memory_map, plot_memory, plot_paging, plot_step_time, plot_timelines,
                                    step_kinds)
from pagedlm.figures.states import states
from pagedlm.memory.block_manager import BlockManager
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace, timelines

from test_frames import RUNS, random_run


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')


def drawn_without_complaint(fig):
    fig.canvas.draw()
    return fig.canvas.get_width_height()


@pytest.mark.parametrize('run', RUNS[::4], ids=str)
def test_the_map_is_what_was_held(run):
    "Each block in each iteration: its holders, its owner, and whether it has tokens."
    trace = random_run(**run).trace
    m = memory_map(trace)
    assert m.kinds.shape == m.owners.shape == m.holders.shape == (trace.meta['memory']['num_blocks'], len(trace))
    for i, st in enumerate(states(trace)):
        count = np.zeros(len(m.kinds), int)
        for s, t in st.tables.items():
            for j, b in enumerate(t):
                if b < 0: continue
                count[b] += 1
                assert m.owners[b, i] >= 0 and m.kinds[b, i] in (1, 2)
                if j * st.block_size < st.computed[s]: assert m.kinds[b, i] == 1, (i, b)
        assert (m.holders[:, i] == count).all() and ((m.owners[:, i] >= 0) == (count > 0)).all()
        assert {*np.flatnonzero(m.kinds[:, i] == 4)} == st.cached - {*np.flatnonzero(count)}
        assert (m.swapped[:, i] >= 0).sum() == len({b for t in st.swap.values() for b in t if b >= 0})


def test_a_part_of_the_map():
    trace = random_run(**RUNS[0]).trace
    whole, part = memory_map(trace), memory_map(trace, 5, 15)
    for a, b in zip(whole[:-1], part[:-1]): assert (a[..., 5:15] == b).all()
    with pytest.raises(ConfigError, match='not in this trace'): memory_map(trace, 10**6)


@pytest.mark.parametrize('width', [4, 7.5])
@pytest.mark.parametrize('run', RUNS[1::13], ids=str)
def test_pictures_of_random_runs(run, width):
    "Cells have their owners' colours; each iteration can be drawn, and no word lies outside of the figure."
    trace = random_run(**run).trace
    m = memory_map(trace)
    axes = plot_memory(trace, width=width)
    assert all(len(ax.get_yticks()) for ax in (plot_timelines(trace, width=width), *plot_step_time(trace, width=width)))
    image = axes[0].images[0].get_array()
    written = m.kinds == 1
    assert np.allclose(image[written], [to_rgba(hues[r % len(hues)]) for r in m.owners[written]])
    assert (axes[1] is not None) == (m.swapped >= 0).any()
    assert drawn_without_complaint(axes[0].figure)[0] == round(width * 80)
    for i in (len(trace) // 3, 2 * len(trace) // 3):
        ax = plot_paging(trace, i, width)
        w, h = drawn_without_complaint(ax.figure)
        assert ax.figure.texts[0].get_text().startswith(f'Iteration {i}: ') and h < 1600
        for text in [*ax.texts, *ax.figure.texts]:
            box = text.get_window_extent()
            assert box.x0 > -2 and box.x1 < w + 2 and box.y0 > -2 and box.y1 < h + 2, (text.get_text(), box, w, h)
        plt.close('all')


def serve(memory, n=6, clock=None):
    engine = Engine(Scheduler(memory, 4, 64, 48), ScriptedExecutor(num_blocks=memory.num_blocks, block_size=4), Trace('full'), clock=clock)
    engine.run([Request(f'r{i}', np.arange(6 + i) + 50 * i, SamplingParams(max_tokens=4 + i)) for i in range(n)])
    return engine.trace


@pytest.mark.parametrize('width', [4, 7.5])
def test_two_memories(width):
    a, b = serve(ContiguousMemory(20, 4, 48, 'max')), serve(BlockManager(20, 4))
    axes = compare_memory(a, b, ('contiguous', 'paged'), width)
    assert axes[0].get_xlim() == axes[1].get_xlim() and axes[0].get_ylim() == axes[1].get_ylim()
    for ax, t in zip(axes, (a, b)): assert f'{len(t)} iterations' in ax.get_title() and f'{t["used"].mean() / 80:.0%}' in ax.get_title()
    drawn_without_complaint(axes[0].figure)
    with pytest.raises(ConfigError, match='same requests'): compare_memory(a, serve(BlockManager(20, 4), 3))


def test_timelines_are_drawn_as_they_are():
    trace = random_run(**RUNS[1]).trace
    lines = [line for line in timelines(trace).values() if line.reason != 'refuse']
    ax = plot_timelines(trace)
    for kind in 'waiting', 'prefill', 'decode', 'preempted':
        boxes = [b for c in ax.collections if c.get_gid() == kind for b in c.get_paths()]
        told = [i for line in lines for i in line.intervals if i.kind == kind]
        assert len(boxes) == len(told) > 0
        assert np.allclose(sorted((b.vertices[:, 0].min(), b.vertices[:, 0].max()) for b in boxes), sorted((i.start, i.stop) for i in told))
    with pytest.raises(ConfigError, match='no request'): plot_timelines(Trace('requests'))


def test_step_times_by_kind():
    ticks = iter(range(10**6))
    trace = serve(BlockManager(20, 4), clock=lambda: .001 * next(ticks))
    kinds, axes = step_kinds(trace), plot_step_time(trace)
    bars = {p.get_gid(): p.get_width() for p in axes[1].patches}
    for k, name in enumerate(('with prompts', 'decode only')):
        assert bars[f'executor, {name}'] == pytest.approx(1e3 * trace['seconds'][kinds == k].mean())
        assert bars[f'host, {name}'] == pytest.approx(1e3 * trace['host_seconds'][kinds == k].mean()) and bars[f'host, {name}'] > 0
    for k, plan in zip(kinds, trace.plans): assert k == (2 if not plan.num_chunks else 0 if (plan.stops - plan.starts > 1).any() else 1)
    with pytest.raises(ConfigError, match='no iterations'): plot_step_time(Trace('requests'))


def test_the_gap_that_is_too_short():
    "Two of three spans are given back, and are no neighbours: the picture marks both, and says why who asks for both waits."
    pool = ContiguousMemory(12, 4, 48, 'request')
    engine = Engine(Scheduler(pool, 6, 64, 48), ScriptedExecutor(num_blocks=12, block_size=4), Trace('full'), clock=None)
    for i, m in enumerate((4, 8, 4)): engine.add(Request(f'r{i}', np.arange(8) + 50 * i, SamplingParams(max_tokens=m)))
    engine.step()
    engine.add(Request('long', np.arange(20), SamplingParams(max_tokens=4)))
    while engine.has_unfinished: engine.step()
    at = 1 + max(e.iteration for e in engine.trace.events if e.kind == 'finish' and e.request_id in ('r0', 'r2'))
    kinds = memory_map(engine.trace, at, at + 1).kinds[:, 0]
    assert [block_kinds[k] for k in kinds] == ['too short'] * 3 + ['written'] * 3 + ['reserved'] + ['too short'] * 3 + ['free'] * 0 + [block_kinds[k] for k in kinds[10:]]
    said = ' '.join(plot_paging(engine.trace, at).figure.texts[0].get_text().split())
    assert said.endswith('8 blocks are free, but no more than 5 in a row, and long needs 6.')


def of_a_large_pool(n, ids=('r0', 'r1', 'r2'), swap=0):
    pool = BlockManager(n, 16, swap)
    executor = ScriptedExecutor(num_blocks=n, block_size=16, num_swap_blocks=swap)
    engine = Engine(Scheduler(pool, 8, 64, 256), executor, Trace('full'), clock=None)
    engine.run([Request(name, np.arange(30 + 9 * i) + 50 * i, SamplingParams(max_tokens=8)) for i, name in enumerate(ids)])
    return engine.trace


@pytest.mark.parametrize('width', [4, 7.5])
def test_a_pool_of_thousands_of_blocks(width):
    "Those in use are drawn, and no word lies over another; the others are counted."
    trace = of_a_large_pool(5000, swap=2000)
    m = memory_map(trace)
    used = np.flatnonzero((m.kinds > 0).any(1))
    ax, _ = plot_memory(trace, width=width)
    image = ax.images[0].get_array()
    assert len(image) == len(used) < 20 and [t for t in ax.texts if t.get_text().strip() == f'and {5000 - len(used):,} more, free']
    assert np.allclose(image[:, -1][m.kinds[used, -1] == 1], [to_rgba(hues[r]) for r in m.owners[used, -1] if r >= 0])
    ax.figure.canvas.draw()
    assert next(t.get_text() for t in ax.get_yticklabels() if t.get_text()) == str(used[0])
    for a, total in zip(compare_memory(trace, of_a_large_pool(4000), width=width), (5000, 4000)):
        assert len(a.images[0].get_array()) == len(used) and any(f'{total - len(used):,} more' in t.get_text() for t in a.texts)
    held = {b for st in states(trace) if st.plan.iteration == 2 for b in st.held()}
    ax = plot_paging(trace, 2, width)
    ax.figure.canvas.draw()
    words = [t.get_text() for t in ax.texts]
    assert f'and {5000 - len(held):,} more, free' in words and 'and 2,000 more, free' in words and all(f'{b}' in words for b in held)
    boxes = [t.get_window_extent() for t in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert ax.figure.get_figheight() < 6


def test_numbers_that_would_overlap_are_left_out():
    "Of hundreds of blocks in use in a narrow figure."
    pool = BlockManager(6000, 1)
    engine = Engine(Scheduler(pool, 8, 4096, 4096), ScriptedExecutor(num_blocks=6000, block_size=1), Trace('full'), clock=None)
    engine.run([Request('r0', np.arange(1500), SamplingParams(max_tokens=2))])
    ax = plot_paging(engine.trace, 0, 4)
    ax.figure.canvas.draw()
    boxes = [t.get_window_extent() for t in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]) and len(boxes) < 10


def test_long_names_are_cut_short(recwarn):
    "Of 120 characters, in every picture."
    trace = of_a_large_pool(40, ('a' * 120, 'b' * 120, 'c'))
    for fig in (plot_timelines(trace, width=4).figure, plot_memory(trace, width=4)[0].figure, plot_paging(trace, 2, 4).figure):
        fig.canvas.draw()
        for ax in fig.axes:
            assert ax.get_window_extent().width > 200
            for t in [*ax.texts, *ax.get_yticklabels()]: assert len(t.get_text()) < 60 and 'a' * 30 not in t.get_text()
    assert not recwarn.list
