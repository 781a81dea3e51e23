"tests/gpu.sh does all that it says, here with tiny shapes on the CPU: every section, outputs compared, no errors."
import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT

pytest.importorskip('triton')
SECTIONS = {'cells', 'tests', 'machine', 'copy', 'decode', 'mixed', 'launch', 'engine'}


def run(tmp_path, *args):
    "Exit status, the JSON, what was printed."
    out = tmp_path/'gpu.json'
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'} | dict(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES='')
    command = [ROOT/'tests'/'gpu.sh', '--smoke', '--out', out, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    status, report, said = run(tmp_path_factory.mktemp('gpu'))
    assert status == 0, said
    return report


def test_every_section_ran(report):
    assert report['sections'].keys() == SECTIONS and report['date'] and report['seconds'] < 480
    assert {(s['status'], *s['errors']) for s in report['sections'].values()} == {('ok',)}


def test_cells(report):
    got = report['sections']['cells']['result']
    marked = {p.name for p in (ROOT/'nbs').glob('[0-9]*.ipynb') if '"#| cuda' in p.read_text(encoding='utf-8')}
    assert set(got['cuda_notebooks']) == marked and {'33_triton_attention.ipynb', '38_cuda_graphs.ipynb'} <= marked
    (cells,) = got['notebooks'].values()
    assert cells['cells'] > 10 and cells['cuda_cells'] == 0 and not cells['errors']
    assert 'test_triton_attention.py' in report['sections']['tests']['result']['files']


def test_attention_is_compared(report):
    for name, speed in ('decode', 'gb_per_s'), ('mixed', 'tflops'):
        cases = report['sections'][name]['result']['cases']
        assert len(cases) == 2 and 'flex' in cases[0]['ms']
        for case in cases:
            assert {'paged', 'sdpa'} <= case['error'].keys() == case['ms'].keys()
            assert all(0 < e < 2e-2 for e in case['error'].values()) and all(case[f'{way}_{speed}'] >= 0 for way in case['ms'])
    assert report['sections']['mixed']['result']['beside_decodes'].keys() == {'together', 'decodes', 'chunk'}
    assert report['sections']['machine']['result']['interpreter']


def test_engine_and_launches(report):
    engine = report['sections']['engine']['result']['tiny']['3 sequences']
    assert engine['same_tokens'] == 1 and all(engine[kind]['tokens_per_s'] > 0 for kind in ('eager', 'graphs'))
    assert engine['eager']['parts_ms'].keys() == {'inputs', 'linears', 'attention', 'head', 'sampling'}
    assert all(us > 0 for us in report['sections']['launch']['result'].values())


def test_one_failure_loses_nothing_else(tmp_path, monkeypatch):
    "A section that fails, and one whose process dies, are reported; those after them run."
    monkeypatch.syspath_prepend(ROOT/'tests')
    out = tmp_path/'gpu.json'
    monkeypatch.setattr(sys, 'argv', ['gpu_bench.py', '--smoke', '--out', str(out), '--only', 'fails,dies,wrong,late,fine'])
    import gpu_bench as bench
    def fails(): raise ValueError('something broke')
    sections = dict(fails=(fails, 9), dies=(lambda: os._exit(3), 9), wrong=(lambda: ({'x': 1}, ['off by 1']), 9),
                    late=(lambda: time.sleep(60), .5), fine=(lambda: ({'x': 2}, []), 9))
    monkeypatch.setattr(bench, 'SECTIONS', sections)
    monkeypatch.setattr(bench, 'ORDER', [('fails', 'dies'), ('wrong',), ('late', 'fine')])
    assert bench.main() == 1
    got = json.loads(out.read_text())['sections']
    assert [(n, s['status']) for n, s in got.items()] == [(n, 'failed') for n in ('fails', 'dies', 'wrong', 'late')] + [('fine', 'ok')]
    assert 'ValueError: something broke' in got['fails']['errors'][0] and got['dies']['errors'] == ['its process died']
    assert got['wrong']['errors'] == ['off by 1'] and got['wrong']['result'] == {'x': 1}
    assert 'more than' in got['late']['errors'][0] and got['fine']['result'] == {'x': 2}
