"""What the CPU kernels promise beyond right numbers: one set of threads, kept between processes, and right without AVX-512."""
import os
import subprocess
import sys

import pytest

RUN = """
import sys, torch
from pagedlm.compute.attention import check, make_case
from pagedlm.compute.cpu_attention import paged_attention
from pagedlm.compute import simd
dtype = getattr(torch, sys.argv[1])
torch.set_num_threads(5)
mixed = [(299, 300), (0, 130), (0, 1), (16, 48), (98, 100), (7, 14), (2000, 2001)]
for heads, kv_heads, dim, size, window in ((9, 3, 64, 16, None), (8, 1, 80, 5, 33), (4, 4, 40, 1, None), (2, 2, 128, 64, 100)):
    check(paged_attention, make_case(mixed, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=size, dtype=dtype, window=window))
check(paged_attention, make_case([(3000, 3002)], num_heads=2, num_kv_heads=1, dtype=dtype, window=1200))        # both tokens' heads are cut
torch.randn(400, 400) @ torch.randn(400, 400)
assert simd._openmp() is not None or sys.platform != 'linux'
print(simd.HAS_BF16, len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}) if sys.platform == 'linux' else 1)
"""


def run(cache, dtype, **env):
    done = subprocess.run([sys.executable, '-c', RUN, dtype], env=os.environ | {'NUMBA_CACHE_DIR': str(cache)} | env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    bf16, libraries = done.stdout.split()
    return bf16 == 'True', int(libraries), done.stderr


def test_kept_between_processes_and_on_torchs_threads(tmp_path):
    _, libraries, said = run(tmp_path, 'bfloat16')
    assert 'compiling CPU kernels' in said, 'the first use takes long, and must say why'
    assert libraries == 1, 'the kernels must run on the threads of the OpenMP library that torch uses'
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.nb?')}
    run(tmp_path, 'bfloat16')
    assert kept and {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.nb?')} == kept, 'a second process must find what the first one compiled'


@pytest.mark.skipif(sys.platform != 'linux' or os.uname().machine != 'x86_64', reason='names features of x86')
def test_right_without_avx512(tmp_path):
    features = '+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt'
    for dtype in ('bfloat16', 'float32'):
        bf16, _, _ = run(tmp_path, dtype, NUMBA_CPU_NAME='haswell', NUMBA_CPU_FEATURES=features)
        assert not bf16
