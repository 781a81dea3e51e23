"What is drawn of random runs is what their traces say."
import matplotlib
matplotlib.use('Agg')
from collections import Counter

import matplotlib.pyplot as plt
import pytest
from test_trace import RUNS, random_run

from pagedlm.core import Request, SamplingParams
from pagedlm.figures.batch import compare, history, plot_batch
from pagedlm.memory.block_manager import BlockManager
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace


def boxes(ax, *kinds): return sum(len(c.get_paths()) for c in ax.collections if c.get_gid() in kinds)


@pytest.mark.parametrize('run', RUNS, ids=str)
def test_cells_agree_with_the_trace(run):
    engine, _, _ = random_run(*run)
    trace = engine.trace
    cells, marks, samples = history(trace)
    kinds = Counter(c.kind for c in cells)
    assert kinds['prefill'] + kinds['decode'] == trace['num_chunks'].sum()
    assert sum(c.num_tokens for c in cells) == trace['num_tokens'].sum()
    assert len({(c.iteration, c.seq_id, c.request_id) for c in cells}) == len(cells)
    waits = Counter(c.iteration for c in cells if c.kind == 'waiting')
    for i, w, s in zip(*(trace[n].astype(int).tolist() for n in ('iteration', 'num_waiting', 'num_swapped'))): assert waits[i] == w + s, i
    assert Counter(m.kind for m in marks if m.kind in ('recompute', 'swap')) == Counter(e.detail for e in trace.events if e.kind == 'preempt')
    assert sum(m.kind in ('end', 'cut') for m in marks) == sum(e.kind in ('finish', 'abort') for e in trace.events)


def test_drawn_by_request_and_by_seat():
    engine, _, _ = random_run(3, True, 'continuous', 'swap')
    for by in 'request', 'seat':
        rows, _ = plot_batch(engine.trace, by=by)
        assert boxes(rows, 'prefill', 'decode') == engine.trace['num_chunks'].sum()
        plt.close('all')
    assert compare(engine.trace, engine.trace, width=4).shape == (2, 2)
    plt.close('all')


def test_after_a_failure_and_of_nothing():
    executor = ScriptedExecutor(num_blocks=16, block_size=4)
    engine = Engine(Scheduler(BlockManager(16, 4), 2, 32), executor, Trace('full'), clock=None)
    rows, slots = plot_batch(engine.trace)
    assert boxes(rows, 'prefill', 'decode') == 0
    for x in 'abc': engine.add(Request(x, [1, 2, 3], SamplingParams(max_tokens=4)))
    engine.step()
    execute, executor.execute = executor.execute, lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError): engine.step()
    executor.execute = execute
    engine.run()
    rows, slots = plot_batch(engine.trace)
    assert boxes(rows, 'prefill', 'decode') == engine.trace['num_chunks'].sum()
    assert Counter(m.kind for m in history(engine.trace).marks) == {'cut': 2, 'end': 1}
    plt.close('all')


def test_an_id_that_is_used_again():
    engine = Engine(Scheduler(BlockManager(16, 4), 1, 32), ScriptedExecutor(num_blocks=16, block_size=4), Trace('full'), clock=None)
    for x in 'ab': engine.add(Request(x, [1, 2, 3], SamplingParams(max_tokens=3)))
    engine.step()
    engine.abort('b')
    engine.add(Request('b', [4, 5], SamplingParams(max_tokens=2)))
    engine.run()
    engine.add(Request('c', [4, 5]))
    engine.abort('c')                                                        # after the last iteration
    cells, marks, samples = history(engine.trace)
    assert list(samples) == ['a', 'b', 'c'] and [m.kind for m in marks] == ['cut', 'end', 'end', 'cut']
    assert [c.iteration for c in cells if c.request_id == 'b' and c.kind == 'waiting'] == [0, 1, 2]
    rows, _ = plot_batch(engine.trace)
    assert boxes(rows, 'prefill', 'decode') == engine.trace['num_chunks'].sum()
    plt.close('all')
