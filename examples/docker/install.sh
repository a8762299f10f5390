#!/usr/bin/env bash
# Installs this checkout: `install.sh cpu` into .venv, as CI does, or `install.sh gpu` into the current Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

packages() {  # Debian's, where this may install them; missing ones cost features, which say so
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  fi
}

case "${1:-}" in
  cpu)  # g++ compiles what PyTorch compiles; bwrap holds the programs of a policy
    packages bubblewrap g++ make || true
    make setup
    ;;
  gpu)  # libnuma is SGLang's; the CUDA 13 compiler comes with the extra
    packages bubblewrap g++ libnuma1 || true
    python3 -m pip install --no-cache-dir '.[gpu,agents,megatron]'
    ;;
  *)
    echo "install.sh: give cpu or gpu" >&2
    exit 2
    ;;
esac
