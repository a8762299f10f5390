#!/usr/bin/env bash
# Makes a Python beside ours, once, and prints its path: own_python.sh NAME FILE_OF_REQUIREMENTS
# It is kept in $XDG_CACHE_HOME/onpolicy/agents (~/.cache/onpolicy/agents); $AGENT_PYTHON makes it.
set -euo pipefail
venv=${XDG_CACHE_HOME:-$HOME/.cache}/onpolicy/agents/$1
if [ ! -e "$venv/installed" ]; then
  "${AGENT_PYTHON:-python}" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --requirement "$2" >&2
  touch "$venv/installed"
fi
echo "$venv/bin/python"
