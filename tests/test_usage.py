"The figures of long runs: exact means, the record's own numbers in the drawing, and no longer for a hundred thousand iterations."
import matplotlib
matplotlib.use('Agg')
import math
import time

import matplotlib.pyplot as plt
import numpy as np
import pytest
from test_trace import random_run

from pagedlm.core import ConfigError, Plan, StepResult, Usage
from pagedlm.figures.usage import plot_latency, plot_usage, plot_waste, step_means, usage_means
from pagedlm.scheduling.cost_model import OPT_13B
from pagedlm.scheduling.simulator import simulate
from pagedlm.scheduling.workloads import poisson_workload, random_workload, sharegpt_like
from pagedlm.trace import Trace, usage_kinds

EMPTY, NOTHING = Plan(0), StepResult(np.zeros(0, np.int64))
SEQUENCES = 'num_running', 'num_waiting', 'num_swapped'


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')


def made(rows):
    "A trace of (start, seconds, used slots of 16)."
    trace = Trace()
    for start, seconds, used in rows: trace.step(EMPTY, NOTHING, Usage(used, 0, 0, 0, 0, 16 - used), 1, used, 0, start, seconds)
    return trace


def area(patch):
    x, y = patch.get_paths()[0].vertices.T
    return abs(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1]) + x[-1] * y[0] - x[0] * y[-1]) / 2


def legends(ax): return [t.get_text() for legend in ax.figure.legends for t in legend.get_texts()]


@pytest.mark.parametrize('seed', range(5))
def test_means_are_exact_integrals(seed):
    rng = np.random.default_rng(seed)
    knots, values = np.r_[0, np.cumsum(rng.integers(1, 9, 50))], rng.integers(0, 99, 50)
    fine = np.repeat(values, np.diff(knots))                                 # in unit steps, to be averaged by hand
    edges = np.unique(rng.integers(0, knots[-1] + 1, 12))
    by_hand = [fine[a:b].mean() for a, b in zip(edges, edges[1:])]
    assert np.allclose(step_means(knots.astype(float), values, edges.astype(float)), by_hand)
    assert step_means(np.array([2., 4.]), np.array([8.]), np.array([0., 4., 8.])).tolist() == [4, 0]


def test_what_holds_when():
    edges, of = usage_means(made([(1, 2, 4), (5, 1, 8), (5.5, 2.5, 16), (8, 0, 3)]))     # idle from 3 to 5; two in flight from 5.5 on; no time
    assert edges.tolist() == [1, 5, 6, 8] and of['used'].tolist() == [4, 8, 16]
    edges, of = usage_means(made([(1, 2, 4), (5, 1, 8), (5.5, 2.5, 16)]), max_bins=1)
    assert edges.tolist() == [1, 8] and of['used'].tolist() == [(4 * 4 + 8 + 16 * 2) / 7] and of['free'][0] == 16 - of['used'][0]


@pytest.mark.parametrize('over', ['time', 'iteration'])
@pytest.mark.parametrize('preemption', ['swap', 'recompute'])
def test_bins_of_a_run_with_preemptions(over, preemption):
    trace = random_run(3, True, 'continuous', preemption, 'requests')[0].trace
    pool = sum(trace[k] for k in usage_kinds)[0]
    weights = np.diff(np.r_[trace['start'], trace.ends[-1]]) if over == 'time' else np.ones(len(trace))
    for max_bins in 1, 10, 10_000:
        edges, of = usage_means(trace, over, max_bins)
        assert len(edges) <= max_bins + 1 and set(of) == {*usage_kinds, *SEQUENCES}
        assert np.allclose(sum(of[k] for k in usage_kinds), pool)
        for name, means in of.items(): assert math.isclose(means @ np.diff(edges), trace[name] @ weights, abs_tol=1e-9), name
        axes = plot_usage(trace, over=over, unit='slots', max_bins=max_bins)
        for patch in axes[0].collections: assert math.isclose(area(patch), trace[patch.get_gid()] @ weights, rel_tol=1e-9), patch.get_gid()
    preempted = [e for e in trace.events if e.kind == 'preempt']
    for how in {e.detail for e in preempted}:
        [ticks] = [x for x in axes[0].lines if x.get_gid() == how]
        assert set(ticks.get_xdata()) <= set(edges)
        assert f'{sum(e.detail == how for e in preempted)} preempted: {how}' in legends(axes[0])
    assert preempted and ('swapped' in legends(axes[0])) == trace['num_swapped'].any()
    assert axes[0].get_xlim() == (edges[0], edges[-1]) and axes[0].get_ylim() == (0, pool)


def test_areas_are_the_simulators_shares():
    trace = Trace()
    report = simulate('orca-pow2', random_workload(40), OPT_13B, 300, trace=trace)        # all at once: the engine is never idle
    pool, _ = plot_usage(trace, max_bins=50)
    shares = {p.get_gid(): area(p) / np.ptp(pool.get_xlim()) / 100 for p in pool.collections}
    assert set(shares) >= {'used', 'reserved', 'internal', 'external'}
    for kind, share in shares.items(): assert math.isclose(share, report['memory'][kind], rel_tol=1e-9), kind
    assert pool.get_ylabel() == '% of the slots' and legends(pool)[:len(shares) + 1] == [*shares, 'free']


def test_a_hundred_thousand_iterations():
    n, trace = 100_000, Trace()
    rng = np.random.default_rng(0)
    for used, seconds, at in zip(rng.integers(0, 17, n).tolist(), rng.exponential(.03, n).tolist(), range(n)):
        trace.iteration = at
        if used == 16: trace.event('preempt', 'a', 0, 'recompute')
        trace.step(EMPTY, NOTHING, Usage(used, 0, 0, 0, 0, 16 - used), 5000, used, 0, trace.now, seconds)
    began = time.process_time()
    pool, line = plot_usage(trace)
    pool.figure.canvas.draw()
    assert time.process_time() - began < 2
    assert all(len(x.get_xdata()) <= 1001 for ax in (pool, line) for x in ax.lines) and len(pool.collections[0].get_paths()[0]) < 5000
    assert math.isclose(area(pool.collections[0]), 100 / 16 * (trace['used'] @ trace['seconds']), rel_tol=1e-9)


def test_on_given_axes():
    trace = made([(0, 1, 4), (1, 1, 8)])
    fig, axes = plt.subplots(2, 2)
    assert plot_usage(trace, tuple(axes[0])) == tuple(axes[0]) and plot_usage(trace, axes[1][0]) == (axes[1][0], None)
    assert not fig.legends and axes[1][0].get_xlabel() == 'seconds' and not axes[1][1].lines
    assert plot_waste({'a': {'memory': {'used': .5}}}, ax=axes[1][1]) is axes[1][1] and plot_latency({'a': [(1, 1)]}, ax=axes[1][1]) is axes[1][1]


def test_nothing_to_draw():
    without, still = Trace(), made([(0, 0, 4)])
    without.step(EMPTY, NOTHING, None, 0, 0, 0, 0, 1)
    for trace, told in (Trace(), 'no iterations'), (Trace('off'), "level 'off'"), (without, 'without a memory'), (still, 'over="iteration"'):
        with pytest.raises(ConfigError, match=told): plot_usage(trace)
    assert usage_means(still, 'iteration').of['used'].tolist() == [4]
    good = made([(0, 1, 4)])
    for wrong in dict(over='token'), dict(unit='bytes'), dict(max_bins=0):
        with pytest.raises(ConfigError, match=str(*wrong.values())): plot_usage(good, **wrong)
    with pytest.raises(ConfigError, match='no reports'): plot_waste({})
    with pytest.raises(ConfigError, match='no points'): plot_latency({'a': [(1, None)]})
    with pytest.raises(ConfigError, match='"log"'): plot_latency({'a': [(1, 1)]}, scale='lin')


def test_waste():
    reports = {name: simulate(name, poisson_workload(sharegpt_like, rate=3, duration=10), OPT_13B, 983) for name in ('orca-max', 'vllm')}
    ax = plot_waste(reports, {'vllm': dict(used=.96)})
    ours = [(p.get_gid(), p.get_width()) for p in ax.patches if p.get_facecolor()[3]]
    told = [(kind, 100 * share) for r in reports.values() for kind, share in r['memory'].items() if share > 0 and kind != 'free']
    assert [k for k, _ in ours] == [k for k, _ in told] and np.allclose([x for _, x in ours], [x for _, x in told])
    assert [(p.get_gid(), p.get_width()) for p in ax.patches if not p.get_facecolor()[3]] == [('used', 96)]
    assert [t.get_text() for t in ax.get_yticklabels()] == list(reports) and legends(ax)[-2:] == ['free', 'published']
    for published, why in ({'Orca': dict(used=.2)}, 'name them alike'), ({'vllm': dict(used=96)}, 'parts of 1'), ({'vllm': dict(token=.9)}, 'no kind'):
        with pytest.raises(ConfigError, match=why): plot_waste(reports, published)


def test_latency():
    curves, paper = {'a': [(1, .03), (2, .2), (3, float('nan'))], 'b': [(1, .04), (4, 9.)]}, {'b': [[1, .05], [3, 1.6]], 'c': [[2, .1]]}
    for scale in 'log', 'linear':
        ax = plot_latency(curves, paper, scale=scale, top=1.0)
        drawn = {x.get_gid(): x.get_xydata().tolist() for x in ax.lines if x.get_gid()}
        assert drawn == {'a': [[1, .03], [2, .2]], 'b': [[1, .04], [4, 9]], 'published b': paper['b'], 'published c': paper['c']}
        assert ax.get_yscale() == scale and ax.get_ylim()[1] == 1 and ax.get_ylim()[0] < .03 and legends(ax) == ['a', 'b', 'c', 'published']
    looks = [(x.get_color(), x.get_marker()) for x in ax.lines if x.get_label() in 'abc']
    assert len(set(looks)) == 3
    alone = plot_latency({'b': curves['b']}, names=['a', 'b', 'c'])
    assert [(x.get_color(), x.get_marker()) for x in alone.lines] == [looks[1]] * 2 and legends(alone) == ['b']
