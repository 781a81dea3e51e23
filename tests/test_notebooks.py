"Every notebook runs, is clean, and is what the package and the README were made from."
import filecmp
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SETTINGS as cfg

PACKAGE = cfg['lib_name']
NOTEBOOKS = sorted((ROOT/'nbs').glob('[!_.]*.ipynb'))
each_notebook = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.name)
# nbdev's test runner sets IN_TEST, which makes `nbdev_export` do nothing
ENV = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
RUN = '''
import sys
from pathlib import Path
from nbdev.test import test_nb
path, root, skip, force = sys.argv[1:]
ok, _ = test_nb(Path(path), skip_flags=skip.split(), force_flags=force.split(), basepath=root)
sys.exit(not ok)
'''


def cells(path: Path, kind: str) -> list[dict]:
    return [c for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == kind]


@pytest.fixture(scope='session')
def flags() -> str:
    import torch
    return 'cuda' if torch.cuda.is_available() else ''


@each_notebook
def test_runs(path, flags):
    done = subprocess.run([sys.executable, '-c', RUN, path, ROOT, cfg['tst_flags'], flags],
                          cwd=path.parent, env=ENV, capture_output=True, text=True, timeout=900)
    if done.returncode: pytest.fail(f'{path.name} failed:\n{(done.stdout + done.stderr)[-6000:]}', pytrace=False)


@each_notebook
def test_reads_well(path):
    code, prose = cells(path, 'code'), cells(path, 'markdown')
    assert path.stat().st_size < 1_000_000, 'a notebook with outputs stays under 1 MB'
    assert prose and re.match(r'# .+\n+> .+', ''.join(prose[0]['source'])), 'opens with a title and a one-line subtitle'
    assert not code or len(prose) > 1, 'has code and no prose'
    outputs = [o for c in code for o in c['outputs']]
    assert not any(o['output_type'] == 'error' for o in outputs), 'saved with an error'
    runs = [c for c in code if not re.search(r'^#\|\s*(eval:\s*false|default_exp)', ''.join(c['source']), re.M)]
    assert not runs or outputs, 'its outputs were not saved: run tools/run_nbs.py'


@pytest.fixture(scope='module')
def fresh(tmp_path_factory, copy_project):
    "The project cleaned and exported anew, from nothing but the notebooks and the one hand-written module."
    project = copy_project(tmp_path_factory.mktemp('fresh')/cfg['repo'], PACKAGE)
    (project/PACKAGE).mkdir()
    (project/PACKAGE/'__init__.py').write_bytes((ROOT/PACKAGE/'__init__.py').read_bytes())
    for command, home in ('nbdev_clean', 'clean'), ('nbdev_export', 'doclinks'):
        subprocess.run([sys.executable, '-c', f'from nbdev.{home} import {command}; {command}()'],
                       cwd=project, env=ENV, check=True)
    return project


def different(a: Path, b: Path, pattern: str) -> list[str]:
    names = sorted({p.relative_to(top) for top in (a, b) for p in top.rglob(pattern) if '.ipynb_checkpoints' not in p.parts})
    return [str(n) for n in names if not ((a/n).exists() and (b/n).exists() and filecmp.cmp(a/n, b/n, shallow=False))]


def test_exports_are_current(fresh):
    assert not different(ROOT/PACKAGE, fresh/PACKAGE, '*.py'), 'run nbdev_export'


def test_notebooks_are_clean(fresh):
    assert not different(ROOT/'nbs', fresh/'nbs', '*.ipynb'), 'run nbdev_clean'


def test_readme_is_current():
    done = subprocess.run([sys.executable, 'tools/readme.py', '--check'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_leads_everywhere():
    "Its links to files work, each notebook is among them, and its two commands and torch's range are the real ones."
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    assert len(NOTEBOOKS) > 1
    links = set(re.findall(r'\]\((?!https?:|#)([^)#]+)', text))
    assert not [x for x in links if not (ROOT/x).exists()]
    assert {f'nbs/{p.name}' for p in NOTEBOOKS} - {f"nbs/{cfg['readme_nb']}"} <= links
    commands = re.findall(r'^pip install -e .*$', text, re.M)
    assert commands == ['pip install -e . && pagedlm demo', "pip install -e '.[dev]' && pytest"]
    torch = f"pip install '{cfg['requirements'].split()[0]}' --index-url"
    assert torch in text and torch in (ROOT/'.github'/'workflows'/'test.yml').read_text()


def test_stale_readme_is_seen(tmp_path, copy_project):
    project = copy_project(tmp_path/cfg['repo'])
    (project/'README.md').write_text('old')
    done = subprocess.run([sys.executable, 'tools/readme.py', '--check'], cwd=project, capture_output=True, text=True)
    assert done.returncode == 1 and 'README.md' in done.stderr
