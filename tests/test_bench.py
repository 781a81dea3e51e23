"The benchmark: its workloads are the ones it names, its clocks account for the whole run, and nonsense is refused in one line."
import csv
import gzip
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from pagedlm import LLM, ConfigError, SamplingParams, StepResult
from pagedlm.serving import bench as b
from pagedlm.serving.cli import main

PARTS = ['scheduling', 'text', 'idle', 'other']


@pytest.fixture(scope='module')
def llm(model_path) -> LLM:
    "Warm, so that no test times a compilation."
    made = LLM(dtype='float32', max_model_len=128, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    b.warm_up(made, b.random_workload(2))
    return made


# workloads

def test_w64_is_the_one_that_rivals_run():
    "Drawn here with the four lines that a benchmark of another engine would have."
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 49000) for _ in range(rng.randint(32, 256))] for _ in range(64)]
    outputs = [rng.randint(16, 256) for _ in range(64)]
    w = b.w64()
    assert (w.prompts, w.output_lens, w.arrivals) == (prompts, outputs, [0.0] * 64)
    assert (w.summary()['prompt_tokens'], w.summary()['output_tokens']) == (9007, 7445)


def test_poisson_keeps_the_requests_and_takes_a_seed():
    w, a, again, other = b.w64(), b.w64().poisson(2), b.w64().poisson(2), b.w64().poisson(2, seed=1)
    assert a.arrivals == again.arrivals != other.arrivals and a.arrivals[0] == 0 and a.arrivals == sorted(a.arrivals)
    assert a.prompts == w.prompts and a.output_lens == w.output_lens and 20 < a.arrivals[-1] < 50          # 63 gaps of 0.5 s


@pytest.mark.parametrize('name', ['t.csv', 't.csv.gz', 't.jsonl', 't.jsonl.gz'])
@pytest.mark.parametrize('columns, times', [
    (('TIMESTAMP', 'ContextTokens', 'GeneratedTokens'),
     ['2023-11-16 18:15:46.6805900', '2023-11-16 18:15:47', '2023-11-17 18:15:46.6805900']),
    (('timestamp', 'input_length', 'output_length'), [1000, 1319.41, 86_401_000]),
    (('arrival', 'input_len', 'output_len'), [7.5, 7.81941, 86407.5])])
def test_trace_formats(tmp_path, name, columns, times):
    rows = [dict(zip(columns, values)) for values in zip(times, (5, 6, 7), (1, 2, 3))]
    with (gzip.open if name.endswith('.gz') else open)(tmp_path/name, 'wt', newline='') as f:
        if 'jsonl' in name: f.writelines(json.dumps(r) + '\n' for r in rows)
        else:
            out = csv.DictWriter(f, columns)
            out.writeheader()
            out.writerows(rows)
    w = b.read_trace(tmp_path/name)
    assert [len(p) for p in w.prompts] == [5, 6, 7] and w.output_lens == [1, 2, 3]
    assert w.arrivals == pytest.approx([0, .31941, 86400], abs=1e-4)
    assert b.read_trace(tmp_path/name, 2).prompts == w.prompts[:2]


@pytest.mark.skipif('PAGEDLM_PAPERS' not in os.environ, reason='PAGEDLM_PAPERS does not name the folder of the public traces')
@pytest.mark.parametrize('name, first', [
    ('azure2023_conv.csv', (374, 44)), ('azure2023_code.csv', (4808, 10)), ('mooncake_conversation_trace.jsonl.gz', (6758, 500)),
    ('sharegpt_opt_lengths_sosp23ae.csv', (8, 66))])
def test_public_traces(name, first):
    w = b.read_trace(Path(os.environ['PAGEDLM_PAPERS'])/name, 50)
    assert len(w.prompts) == 50 and first in zip(map(len, w.prompts), w.output_lens)
    assert (w.arrivals[-1] > 0) == ('sharegpt' not in name)


# what is timed

def test_watching_changes_nothing(llm):
    w = b.random_workload(5, (4, 40), (2, 9), seed=3)
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in w.output_lens]
    want = [o.outputs[0].token_ids for o in llm.generate(list(w.prompts), greedy, use_tqdm=False)]
    watch = b.Watch(llm)
    watch.serve(w)
    assert watch.outputs == want and not {'add', 'step'} & vars(llm.engine).keys() and 'execute' not in vars(llm.engine.executor)
    assert [len(t) for t in watch.token_times.values()] == w.output_lens and not llm._live


class Sleeps:
    "No model: an executor that takes its time, and accounts for it in its own words."
    def __init__(self): self.times = {'dreaming': 0.0, 'answering': 0.0}

    def execute(self, plan):
        start = time.perf_counter()
        time.sleep(.3)
        middle = time.perf_counter()
        result = StepResult(np.full(len(plan.due), 7))
        self.times['dreaming'] += middle - start
        self.times['answering'] += time.perf_counter() - middle
        return result


def test_requests_come_when_they_are_due_and_their_clocks_start_then(llm):
    "Steps of 0.3 s: who is due 0.1 s after the start waits for the end of the first step, then for his own; nobody is served early."
    one = llm.variant()
    one.engine.executor = Sleeps()
    w = b.Workload('by hand', [0.0, .1, 1.6], [[5] * 8, [6] * 8, [7] * 8], [2, 1, 1])
    watch = b.Watch(one)
    watch.serve(w)
    first, second, third = watch.token_times.values()
    assert .3 <= first[0] and .6 <= second[0] == first[1] < 1.6 and third[0] >= 1.9
    waits = b.latencies(w.arrivals, [first, second, third])
    assert waits['ttft_s']['max'] == second[0] - .1 >= .5 and waits['itl_s']['count'] == 1
    assert 0 < watch.idle < 1 and len(watch.rows) == 3
    parts = watch.parts()
    assert list(parts) == ['scheduling', 'dreaming', 'answering', 'text', 'idle', 'other']    # whatever the executor accounts for
    assert parts['dreaming'] >= .9 and abs(sum(parts.values()) - watch.seconds) < 1e-9 and 0 <= parts['other'] < .03 * watch.seconds + .05


def test_a_small_pool_is_seen(llm):
    w = b.random_workload(3, (6, 6), (12, 12))
    tight = b.measure(llm.variant(num_blocks=4, block_size=8, max_model_len=32), w)
    roomy = b.measure(llm.variant(num_blocks=b.blocks_needed(w, 8, 8), block_size=8, max_model_len=32), w)
    assert tight['preemptions'] > 0 == roomy['preemptions'] and tight['output_tokens'] == roomy['output_tokens'] == 36


# the command

@pytest.fixture(scope='module')
def result(model_path, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp('bench')/'out.json'
    flags = ('--workload random --num-prompts 7 --input-len 4:90 --output-len 2:12 --seed 5 --dtype float32 --repeat 2 '
             '--max-num-seqs 4 --max-num-batched-tokens 64 --json')
    assert main(['bench', *flags.split(), str(path)]) == 0
    return json.loads(path.read_text())


def test_parts_sum_to_the_whole(result):
    parts, whole = result['parts_s'], result['seconds']
    assert set(PARTS) < set(parts) and len(parts) >= len(PARTS) + 2 and min(parts.values()) >= 0 and parts['idle'] == 0
    assert sum(parts.values()) == pytest.approx(whole, rel=1e-9) and sum(result['shares'].values()) == pytest.approx(1)
    assert parts['other'] < .03 * whole + .05
    steps = result['step_s']
    for k in steps['all']['parts_s']:
        assert steps['decode']['parts_s'][k] + steps['mixed']['parts_s'][k] == pytest.approx(steps['all']['parts_s'][k])
        assert sum(result['per_step'][k]) == pytest.approx(steps['all']['parts_s'][k], abs=1e-6 * len(result['per_step'][k]))


def test_tokens_are_counted_right(result):
    w = b.random_workload(7, (4, 90), (2, 12), seed=5).summary()
    assert result['workload'] == w and result['output_tokens'] == w['output_tokens'] and result['preemptions'] == 0
    assert sum(result['per_step']['tokens']) == w['prompt_tokens'] + w['output_tokens'] - 7             # nobody computes his last token
    assert max(result['per_step']['tokens']) <= 64 and max(result['per_step']['sequences']) == 4
    assert (result['ttft_s']['count'], result['itl_s']['count']) == (7, w['output_tokens'] - 7)
    assert result['output_tokens_per_s'] == pytest.approx(w['output_tokens'] / result['seconds']) == pytest.approx(min(result['runs']))
    assert len(result['runs']) == 2 and result['spread'] == pytest.approx(max(result['runs']) / min(result['runs']) - 1)


def test_percentiles_are_ordered(result):
    rows = [result[k] for k in ('ttft_s', 'itl_s', 'tpot_s', 'e2e_s')] + list(result['step_s'].values())
    for row in rows: assert row['count'] and 0 < row['p50'] <= row['p90'] <= row['p99'] <= row['max'] >= row['mean'] > 0
    counts = [result['step_s'][k]['count'] for k in ('all', 'decode', 'mixed')]
    assert counts[0] == counts[1] + counts[2] == len(result['per_step']['seconds'])
    assert result['ttft_s']['max'] <= result['e2e_s']['max'] <= result['seconds']


def test_what_was_measured_is_told(result):
    assert result['command'].startswith('pagedlm bench --workload random') and result['command'].endswith('--json out.json')
    assert result['machine'] and {'pagedlm', 'torch', 'numpy', 'numba', 'python'} <= result['versions'].keys()
    engine = result['engine']
    assert (engine['max_num_seqs'], engine['max_num_batched_tokens'], engine['trace'], engine['dtype']) == (4, 64, 'requests', 'torch.float32')
    table = b.report(result)
    assert f'{result["output_tokens_per_s"]:.1f} output tokens/s' in table and all(part in table for part in result['parts_s'])


@pytest.mark.parametrize('flags', [
    '--num-prompts 8', '--workload w64 --input-len 8', '--workload random --input-len 9:3', '--workload random --output-len a:b',
    '--workload random --output-len 1:2:3', '--workload random --num-prompts 0', '--workload random --input-len 0',
    '--workload no_such_file.csv', '--rate 0', '--rate nan', '--repeat 0', '--threads 0', '--num-blocks 0',
    '--json no/such/folder/out.json', '--max-model-len 20',
    '--num-prompts many', '--speed 9'])
def test_mistakes_are_one_line_before_anything_is_loaded(flags, capsys, monkeypatch):
    monkeypatch.setattr('pagedlm.serving.llm.LLM', lambda *_, **__: pytest.fail('a model was loaded'))
    try: status = main(['bench', *flags.split()])
    except SystemExit as e: status = e.code
    out, err = capsys.readouterr()
    assert status == 2 and not out and len(err.splitlines()) == 1 and err.startswith('pagedlm')


@pytest.mark.parametrize('flags, told', [('--policy lifo', 'lifo'), ('--trace all', 'all'), ('--max-num-batched-tokens 8', '8'),
                                         ('--num-blocks 4', '--max-model-len 64')])
def test_bad_engines_are_one_line(model_path, flags, told, capsys):
    assert main(['bench', '--dtype', 'float32', *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and told in err


@pytest.mark.parametrize('text', ['', 'a,b\n1,2\n', 'input_len,output_len\nx,1\n', 'input_len,output_len\n0,1\n', 'input_len,output_len\n3\n'])
def test_bad_traces_are_typed(tmp_path, text):
    (tmp_path/'t.csv').write_text(text)
    with pytest.raises(ConfigError): b.read_trace(tmp_path/'t.csv')


@pytest.mark.parametrize('text', ['{"input_len": 3', '[1, 2]\n', '{"input_len": 3, "output_len": 2}\n{"input_len": 3}\n', '\xff\x00'])
def test_bad_json_lines_are_typed(tmp_path, text):
    (tmp_path/'t.jsonl').write_bytes(text.encode('latin-1'))
    with pytest.raises(ConfigError): b.read_trace(tmp_path/'t.jsonl')
