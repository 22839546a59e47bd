#!/usr/bin/env bash
# What to run once there is a machine with NVIDIA GPUs: the suite, the examples, a sweep,
# and the times of the programs of benchmarks/absent.py, each with its log.
#
#   benchmarks/on_a_gpu.sh [FOLDER FOR LOGS]
#
# Needs python3 (3.11 or newer) and a driver. Where nothing can be downloaded, put the
# wheels into a folder first and name it with WHEELS=: on a machine of the same Python,
#   pip wheel -w wheels '.[test,gpu]'
# which are, besides those of the test extra,
#   jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt
#   nvidia-cublas nvidia-cuda-cccl nvidia-cuda-crt nvidia-cuda-cupti nvidia-cuda-nvcc
#   nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cusolver
#   nvidia-cusparse nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvvm
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${1:-runs/on_a_gpu}
mkdir -p "$logs"
status=0

run() { # run NAME COMMAND...: its output into a log; goes on where it fails
  local name=$1
  shift
  printf '\n== %s: %s\n' "$name" "$*"
  if "$@" >"$logs/$name.log" 2>&1; then
    tail -n 3 "$logs/$name.log"
  else
    printf 'failed, see %s\n' "$logs/$name.log"
    tail -n 20 "$logs/$name.log"
    status=1
    return 1
  fi
}

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=.venv-gpu/bin/python
  python3 -m venv .venv-gpu || exit 1
  offline=()
  [ -n "${WHEELS:-}" ] && offline=(--no-index --find-links "$WHEELS")
  run install "$python" -m pip install -q "${offline[@]}" -e '.[test,gpu]'
fi

run times "$python" -m benchmarks.on_a_gpu
run overhead "$python" -m benchmarks.overhead --small --devices 1
run first_call "$python" -m benchmarks.first_call --models "2 layers, adam" "12 scanned" \
  --devices 1 --rounds 3
run audit "$python" -m benchmarks.audit --rounds 1

# What follows is not timed, and runs at once.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
beside() { # beside NAME COMMAND...: as run, without waiting; `all_beside` waits
  run "$@" >"$logs/$1.said" &
  started+=("$1:$!")
}
all_beside() {
  for one in "${started[@]}"; do
    wait "${one##*:}" || status=1
    cat "$logs/${one%%:*}.said" && rm "$logs/${one%%:*}.said"
  done
}
started=()
beside planned "$python" -m benchmarks.absent --devices 1
for example in digits estimator_digits regression nnx_digits embeddings anywhere gpt; do
  beside "example_$example" "$python" "examples/$example.py"
done
beside notebook env --chdir="$logs" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m IPython "$PWD/notebooks/06_first_evening.ipynb"
beside sweep "$python" -m towerjax bench benchmarks.peers.trials:build \
  docs/evidence/grid.toml --peer hand=benchmarks.peers.trials:build_by_hand --out "$logs/sweep.jsonl"
# Two runs, whose digests of all bits must be the same.
for time in once again; do
  beside "same_bits_$time" env XLA_FLAGS=--xla_gpu_deterministic_ops=true \
    "$python" -m benchmarks.same_bits --json
done
# Towers on the GPU; and the suite, which makes CPU devices for itself, beside it.
beside test_gpu "$python" -m pytest -q tests/project/test_gpu.py
beside suite env JAX_PLATFORMS=cpu,cuda "$python" -m pytest -q -n auto
all_beside
run same_bits cmp "$logs/same_bits_once.log" "$logs/same_bits_again.log"
exit "$status"
