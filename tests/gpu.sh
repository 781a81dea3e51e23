#!/usr/bin/env bash
# Everything that needs a GPU, in one go: every `#| cuda` cell and test, then the measurements. At most 8 minutes on one H200.
#
#   tests/gpu.sh --prepare         beforehand, where there is a network: puts what that machine may lack (fastcore, pure Python) into
#                                  .venv-gpu/, which git ignores; carry that folder along with the working tree
#   tests/gpu.sh [--out FILE]      on the machine with the GPU. It needs Python 3.12, torch 2.11, triton 3.6, numpy and numba; matplotlib for
#                                  the notebooks, pytest for the tests; no network
#   tests/gpu.sh --smoke           the same on a CPU, with tiny shapes and Triton's interpreter, in less than a minute
#
# Writes one JSON (nbs/results/gpu.json, build/gpu_smoke.json, or FILE; until it is done, with the ending .part): the machine and its
# versions, and of each section its status, seconds, results, and error if any.
# PYTHON names another interpreter than python3. `--only copy,decode` runs some of the sections.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [[ ${1:-} == --prepare ]]; then
    exec "$python" -m pip install --quiet --upgrade --target .venv-gpu --no-deps --only-binary=:all: --python-version 3.12 'fastcore<2'
fi
if [[ " $* " == *' --smoke '* ]]; then
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1
fi
export PYTHONPATH="$PWD:$PWD/.venv-gpu${PYTHONPATH:+:$PYTHONPATH}" MPLBACKEND=Agg PYTHONUNBUFFERED=1
exec "$python" tests/gpu_bench.py "$@"
