#!/bin/bash
# Runs the checks that need a GPU: vectors against the CPU's in full and half precision and compiled, real lack of memory,
# training. Under 8 minutes. Exits with 77 where there is no GPU: nothing was checked then.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no GPU here (torch finds no CUDA device): nothing was checked"
  exit 77
fi
"$python" -c 'import torch; print("GPU:", torch.cuda.get_device_name(0), "torch", torch.__version__)'
exec timeout 480 "$python" -m pytest -q -p no:cacheprovider tests/udf/test_foundation_gpu.py tests/udf/test_foundation_device.py
