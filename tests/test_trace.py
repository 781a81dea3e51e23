"The trace of random runs: its replay against the executor's own tables, its lives against the outputs, its files against their rules."
import json
from collections import Counter

import numpy as np
import pytest

from pagedlm.core import ConfigError, Request, SamplingParams
from pagedlm.memory.block_manager import BlockManager
from pagedlm.memory.contiguous import ContiguousMemory
from pagedlm.scheduling.engine import Engine, ScriptedExecutor
from pagedlm.scheduling.scheduler import Scheduler
from pagedlm.trace import Trace, columns, replay, timelines


class Watching(ScriptedExecutor):
    "Keeps the part of each table that attention read, by iteration."
    def execute(self, plan):
        result = super().execute(plan)
        read = {c.seq_id: self.tables[c.seq_id][:-(-c.stop // self.block_size)] for c in plan.chunks}
        self.history.append((plan.iteration, read))
        return result


def random_run(seed: int, paged: bool, policy: str, preemption: str, trace: Trace | str = 'full'):
    rng = np.random.default_rng(seed)
    blocks, size, max_len = int(rng.integers(8, 16)), int(rng.choice([1, 4, 5])), 40
    if paged: memory = BlockManager(blocks * 5 // size, size, 6)
    else: memory = ContiguousMemory(blocks * 16 // size, size, max_len, 'request')
    executor = Watching(num_blocks=memory.num_blocks, block_size=size, num_swap_blocks=6, seconds_per_token=0.001)
    executor.history = []
    if isinstance(trace, str): trace = Trace(trace)
    engine = Engine(Scheduler(memory, 8, 24, max_len, policy, preemption, 0.01, ()), executor, trace, clock=None)
    seqs = []
    for step in range(400):
        if len(seqs) < 24 and rng.random() < 0.4:
            params = SamplingParams(n=int(rng.choice([1, 1, 3])), max_tokens=int(rng.integers(1, 20)))
            try: seqs += engine.add(Request(f'r{len(seqs)}', rng.integers(0, 50, rng.integers(1, 20)), params, engine.now))
            except ValueError: pass
        if seqs and rng.random() < 0.05: engine.abort(seqs[rng.integers(len(seqs))].request.request_id)
        if engine.has_unfinished: engine.step()
        elif len(seqs) >= 24: break
    assert not engine.has_unfinished
    return engine, executor, seqs


RUNS = [(seed, paged, policy, preemption) for seed in range(6) for paged in (True, False) for policy in ('continuous', 'static')
        for preemption in ('recompute', 'swap')]


def test_replay_is_what_the_executor_had():
    preempted = 0
    for run in RUNS:
        engine, executor, _ = random_run(*run)
        shown = {plan.iteration: {s: list(t) for s, t in tables.items()} for plan, tables in replay(engine.trace)}
        for iteration, tables in executor.history:
            got = shown[iteration]
            assert {s: got[s][:len(t)] for s, t in tables.items()} == tables, (run, iteration)
        preempted += sum(e.kind == 'preempt' for e in engine.trace.events)
    assert preempted > 20


def test_nobody_else_holds_a_block():
    "A block that two requests hold in one iteration would be a table that was let go too late."
    for run in RUNS:
        engine, _, seqs = random_run(*run)
        request = {s.seq_id: s.request.request_id for s in seqs}
        for plan, tables in replay(engine.trace):
            owner = {}
            for s, table in tables.items():
                for b in table: assert owner.setdefault(b, request[s]) == request[s], (run, plan.iteration, b)


@pytest.mark.parametrize('level', ['requests', 'full'])
def test_lives_agree_with_the_outputs(level):
    for run in RUNS[::5]:
        engine, _, seqs = random_run(*run, level)
        lines = timelines(engine.trace)
        for s in seqs:
            line = lines[s.request.request_id]
            assert line.arrival == s.request.arrival and line.finish is not None
            assert (line.first_token is not None) == any(len(x.output_token_ids) for x in seqs if x.request is s.request)
            assert sum(i.stop - i.start for i in line.intervals) == pytest.approx(line.finish - line.arrival)
            assert all(a.stop == b.start for a, b in zip(line.intervals, line.intervals[1:]))
            if level == 'full': assert len(line.token_times) >= max(len(x.output_token_ids) for x in seqs if x.request is s.request)
        assert len(engine.trace) > 20 and bool(engine.trace.plans) == (level == 'full')


def test_files(tmp_path):
    engine, *_ = random_run(3, True, 'continuous', 'swap')
    trace = engine.trace
    trace.to_json(tmp_path / 'a.json')
    again = Trace.from_json(tmp_path / 'a.json')
    assert again.events == trace.events and list(map(str, again.plans)) == list(map(str, trace.plans))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again.results, trace.results))
    assert [dict(t) for _, t in replay(again)][-1:] == [dict(t) for _, t in replay(trace)][-1:] and timelines(again) == timelines(trace)
    trace.to_perfetto(tmp_path / 'a.perfetto.json')
    events = json.loads((tmp_path / 'a.perfetto.json').read_text())['traceEvents']
    threads = {}
    for e in events:
        if e['ph'] == 'X': threads.setdefault((e['pid'], e['tid']), []).append((e['ts'], e['ts'] + e['dur']))
    for spans in threads.values():                                         # no thread has slices that overlap
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    assert sum(e['ph'] == 'X' and e['pid'] == 3 for e in events) == sum(p.num_chunks for p in trace.plans)


def test_limit_keeps_the_last_iterations():
    "The numbers and events of a trace with a limit are the end of those of one without, and what is derived from them still works."
    whole_lives = Counter()
    for run in RUNS[::7]:
        engine, *_ = random_run(*run, 'requests')
        whole, short = engine.trace, random_run(*run, Trace('requests', limit=40))[0].trace
        n, gone = len(short), len(whole.events) - len(short.events)
        assert 20 <= n < 40 < len(whole) and short.events == whole.events[gone:]
        for name in columns: assert (short[name] + gone * (name == 'num_events') == whole[name][-n:]).all()
        known, lines = timelines(whole), timelines(short)
        for name, line in lines.items():
            assert line == known[name] or line.arrival is None and line.finish in (None, known[name].finish)
        whole_lives.update(line.arrival is not None for line in lines.values())
    assert min(whole_lives.values()) > 5, whole_lives


def test_limit_that_cannot_be():
    for level, limit in ('requests', 1), ('requests', 0), ('full', 20):
        with pytest.raises(ConfigError, match=f'limit={limit}'): Trace(level, limit=limit)
