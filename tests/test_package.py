"The package as its users get it: quick to import, layered, complete on PyPI's terms, and working from its wheel."
import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from conftest import ROOT, SETTINGS
from packaging.requirements import Requirement

import pagedlm

PACKAGE = ROOT/'pagedlm'
REQUIREMENTS = [Requirement(r) for r in shlex.split(SETTINGS['requirements'])]
ENV = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'IN_TEST')}
MODULES = sorted(p for p in PACKAGE.rglob('*.py') if not p.name.startswith('_'))


def python(code: str, tmp_path: Path, exe: str | Path = sys.executable) -> str:
    "What `code` prints, run by a new interpreter far from the project."
    done = subprocess.run([exe, '-c', code], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# importing

def test_import_is_quick(tmp_path):
    code = 'from time import perf_counter as now; t = now(); import pagedlm; print(now() - t)'
    times = [float(python(code, tmp_path)) for _ in range(5)]
    assert min(times) < 0.15, times


@pytest.mark.parametrize('imports, heavy', [
    ('pagedlm', 'torch triton numba matplotlib IPython numpy'),
    ('pagedlm.core pagedlm.trace pagedlm.memory.block_manager pagedlm.memory.contiguous pagedlm.scheduling.engine',
     'torch triton matplotlib IPython tokenizers transformers'),
    ('pagedlm.serving.llm', 'triton matplotlib IPython transformers'),
], ids=['package', 'no torch below compute', 'llm'])
def test_import_loads_nothing_heavy(imports, heavy, tmp_path):
    code = f'import sys, {", ".join(imports.split())}; print(*[m for m in {heavy.split()} if m in sys.modules])'
    assert python(code, tmp_path) == ''


@pytest.mark.parametrize('name', pagedlm.__all__)
def test_lazy_name_resolves(name):
    value = getattr(pagedlm, name)
    assert value is getattr(importlib.import_module(f'pagedlm.{pagedlm._home[name]}'), name)
    assert name in dir(pagedlm)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match='no_such_name'): pagedlm.no_such_name


# layers: (the package's parts that it may import, third parties that it may import)

EVERYTHING = ' '.join(r.name for r in REQUIREMENTS)
LAYERS = {
    'core': ('core', 'numpy fastcore'),
    'trace': ('core trace', 'numpy fastcore'),
    'memory': ('core memory', 'numpy fastcore'),
    'scheduling': ('core trace memory scheduling', 'numpy fastcore numba'),
    'compute': ('core memory compute', EVERYTHING),
    'serving': ('core trace memory scheduling compute serving figures', EVERYTHING),
    'figures': ('core trace memory scheduling compute serving figures', EVERYTHING),
}


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix('').parts


def imported(path: Path) -> list[str]:
    "Absolute names of every module that the one at `path` imports, at its top or inside a function."
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import): names += [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom):
            base = [*parts(path)[:-node.level]] if node.level else []
            module = '.'.join(base + ([node.module] if node.module else []))
            # `from ..compute import model` imports a module; `from .core import Plan` does not
            names += [f'{module}.{a.name}' if is_module(f'{module}.{a.name}') else module for a in node.names]
    return names


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split('.'))
    return path.with_suffix('.py').exists() or (path/'__init__.py').exists()


def notebook(path: Path) -> str:
    "The notebook that exports the module at `path`; notebooks are numbered in reading order."
    return Path(re.search(r'File to edit: (\S+\.ipynb)', path.read_text(encoding='utf-8'))[1]).name


@pytest.mark.parametrize('path', MODULES, ids=lambda p: '.'.join(parts(p)[1:]))
def test_layering(path):
    ours, others = (names.split() for names in LAYERS[parts(path)[1]])
    for name in imported(path):
        top, *rest = name.split('.')
        if top != 'pagedlm': assert top in others or top in sys.stdlib_module_names, f'{name} is not for this layer'
        elif rest:
            assert rest[0] in ours, f'{name} is not for this layer'
            target = ROOT.joinpath(*name.split('.')).with_suffix('.py')
            if target.exists(): assert notebook(target) <= notebook(path), f'{name} comes later in the book'


def test_only_init_is_written_by_hand():
    "Every other module names the notebook that it comes from; inner __init__.py files are empty."
    assert all((ROOT/'nbs'/notebook(p)).exists() for p in MODULES)
    assert [p for p in PACKAGE.rglob('__init__.py') if p.stat().st_size] == [PACKAGE/'__init__.py']


def test_layering_would_see_a_breach(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], 'ROOT', tmp_path)
    for name in 'memory/table', 'scheduling/scheduler', 'core':
        path = tmp_path/'pagedlm'/f'{name}.py'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('# File to edit: ../nbs/10_x.ipynb\n')
    path = tmp_path/'pagedlm'/'memory'/'table.py'
    for good in 'from ..core import Plan', 'import numpy as np', 'from pagedlm.core import Plan':
        path.write_text(f'# File to edit: ../nbs/10_x.ipynb\n{good}\n'); test_layering(path)
    for bad in ('from ..scheduling import scheduler', 'from ..scheduling.scheduler import Scheduler', 'import torch',
                'def f():\n    from pagedlm.scheduling.scheduler import Scheduler', 'import requests'):
        path.write_text(f'# File to edit: ../nbs/10_x.ipynb\n{bad}\n')
        with pytest.raises(AssertionError, match='not for this layer'): test_layering(path)


# packaging

@pytest.fixture(scope='module')
def dist(tmp_path_factory, copy_project) -> tuple[Path, Path]:
    "(wheel, sdist): the sdist built from a copy of the project, the wheel built from the sdist, nothing fetched."
    project = copy_project(tmp_path_factory.mktemp('build')/'pagedlm')
    done = subprocess.run([sys.executable, '-m', 'build', '--no-isolation', project, '--outdir', project/'out'],
                          cwd=project, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((project/'out').glob('*.whl')), next((project/'out').glob('*.tar.gz'))


def test_sdist_has_what_setup_reads(dist):
    with tarfile.open(dist[1]) as f: names = {n.split('/', 1)[1] for n in f.getnames() if '/' in n}
    assert {'setup.py', 'settings.ini', 'README.md', 'LICENSE', 'nbs/index.ipynb', 'tests/conftest.py'} <= names
    assert not [n for n in names if '.venv' in n or '.ipynb_checkpoints' in n]


def test_wheel_has_every_module(dist):
    with zipfile.ZipFile(dist[0]) as f: names = {n for n in f.namelist() if '.dist-info/' not in n}
    assert names == {p.relative_to(ROOT).as_posix() for kind in ('*.py', '*.js', '*.css') for p in PACKAGE.rglob(kind)}


def test_metadata(dist):
    with zipfile.ZipFile(dist[0]) as f:
        info = next(n.split('/')[0] for n in f.namelist() if '.dist-info/' in n)
        meta = message_from_bytes(f.read(f'{info}/METADATA'))
        assert any(n.endswith('/LICENSE') for n in f.namelist())
        assert 'pagedlm = pagedlm.serving.cli:main' in f.read(f'{info}/entry_points.txt').decode()
    needs = [Requirement(r) for r in meta.get_all('Requires-Dist')]
    always = {r.name: r for r in needs if 'extra' not in str(r.marker)}
    assert always.keys() == {r.name for r in REQUIREMENTS}
    assert all(always[r.name].specifier == r.specifier for r in REQUIREMENTS)
    assert {name for name, r in always.items() if r.marker} == {'triton'}
    triton = always['triton'].marker
    assert triton.evaluate({'sys_platform': 'linux'}) and not triton.evaluate({'sys_platform': 'darwin'})
    dev = {r.name for r in needs if r.marker and r.marker.evaluate({'extra': 'dev'}) and 'extra' in str(r.marker)}
    assert meta.get_all('Provides-Extra') == ['dev']
    assert dev == {Requirement(r).name for r in shlex.split(SETTINGS['dev_requirements'])}
    assert (meta['Version'], meta['Requires-Python']) == (pagedlm.__version__, '>=3.11')
    assert meta.get_payload().strip().startswith((ROOT/'README.md').read_text(encoding='utf-8')[:200])


@pytest.fixture(scope='module')
def installed(dist, tmp_path_factory) -> Path:
    """bin/ of a virtual environment that has the wheel and nothing else of ours.

    Its requirements are those of this environment, lent by a .pth file: only folders of installed packages go in, and
    files in them that lead on to the project (an editable install) are not followed.
    """
    home = tmp_path_factory.mktemp('empty')/'venv'
    venv.create(home, symlinks=True)
    bin, lent = home/'bin', [p for p in sys.path if Path(p).name in ('site-packages', 'dist-packages')]
    site = Path(python('import sysconfig; print(sysconfig.get_path("purelib"))', home, bin/'python'))
    subprocess.run([sys.executable, '-m', 'pip', '--python', bin/'python', 'install', '-q', '--no-deps', '--no-index', dist[0]],
                   cwd=home, env=ENV, check=True)
    (site/'lent.pth').write_text('\n'.join(lent))
    return bin


def test_wheel_is_what_is_imported(installed, tmp_path):
    code = 'import sys, pagedlm; print(pagedlm.__file__); print(*sys.path, sep="\\n")'
    file, *path = python(code, tmp_path, installed/'python').splitlines()
    assert Path(file).is_relative_to(installed.parent) and str(ROOT) not in path


def test_wheel_has_the_command(installed, tmp_path):
    done = subprocess.run([installed/'pagedlm', '--help'], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0 and 'demo' in done.stdout, done.stdout + done.stderr


def test_wheel_has_the_player(installed, tmp_path):
    code = 'from pagedlm.figures.player import script, style; print(len(script()), len(style()))'
    assert min(map(int, python(code, tmp_path, installed/'python').split())) > 1000


def test_wheel_runs_an_engine(installed, tmp_path):
    code = '''
from pagedlm import BlockManager, Engine, Request, SamplingParams, Scheduler, ScriptedExecutor, check_pool
memory = BlockManager(num_blocks=8, block_size=4)
engine = Engine(Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=16), ScriptedExecutor(num_blocks=8, block_size=4))
seqs = engine.run([Request('a', [1, 2, 3, 4, 5], SamplingParams(n=2, max_tokens=3)), Request('b', [6], SamplingParams(max_tokens=9))])
check_pool(memory)
print(*[len(s.output_token_ids) for group in seqs.values() for s in group], memory.num_free_blocks)
'''
    assert python(code, tmp_path, installed/'python') == '3 3 9 8'
