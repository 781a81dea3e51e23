"What the tests share: threads, a copy of the project, the default model."
import configparser
import os
import shutil
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_config = configparser.ConfigParser(delimiters=['='])
_config.read(ROOT/'settings.ini', encoding='utf-8')
SETTINGS = _config['DEFAULT']


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)      # as under nohup; some tests press Ctrl-C
    # read by torch and its libraries when they load, here and in every notebook's own process
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    os.environ.setdefault('OMP_NUM_THREADS', str(max(1, cores // (config.getoption('numprocesses', None) or 1))))
    os.environ.setdefault('OMP_WAIT_POLICY', 'passive')     # threads that spin at barriers are slow where cores are busy


@pytest.fixture(scope='session')
def copy_project():
    "f(target, *without): the project's files at `target`, less what git ignores and the names in `without`."
    ignored = [line.rstrip('/') for line in (ROOT/'.gitignore').read_text().split()] + ['.git']
    return lambda target, *without: shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*ignored, *without))


@pytest.fixture(scope='session')
def model_path() -> Path:
    "The default model's folder, fetched once and cached."
    from pagedlm.compute.weights import resolve
    from pagedlm.core import ModelNotFoundError
    try: return resolve('smollm2-135m')
    except ModelNotFoundError as e: pytest.skip(f'the default model is not here: {e}')
