"""Compile the Triton kernels for GPUs that are not here and read what the assembler did: no register may spill to memory.

Needs no GPU, but a process in which the interpreter was never switched on; so each architecture gets one of its own.
"""
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip('triton')

TARGETS = 80, 90, 100, 'gfx942'                                          # pagedlm.compute.triton_compiled.TARGETS
SHAPES = [(dtype, dim) for dtype in ('float16', 'bfloat16') for dim in (64, 128)]


def start(arch, cache) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'} | {'TRITON_CACHE_DIR': str(cache)}      # never an old kernel
    return subprocess.Popen([sys.executable, __file__, json.dumps([arch, SHAPES])], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_no_spills(tmp_path):
    running = {arch: start(arch, tmp_path / str(arch)) for arch in TARGETS}
    for arch, process in running.items():
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, f'{arch}: {err[-2000:]}'
        spilled = json.loads(out.splitlines()[-1])
        assert len(spilled) == 2 * 5 + 2 * 2, spilled                    # the small kernels differ in 16 bits by one conversion: one dtype
        assert not any(spilled.values()), f'{arch} spills (bytes of a thread): {spilled}'


if __name__ == '__main__':
    import torch
    from pagedlm.compute.triton_compiled import launches, report
    arch, shapes = json.loads(sys.argv[1])
    found = {f'{name} {dtype} {dim}': report(arch, launch)['spilled'] for dtype, dim in shapes
             for name, launch in launches(arch, getattr(torch, dtype), dim).items() if name in ('decode', 'chunk') or dtype == 'bfloat16'}
    print(json.dumps(found))
