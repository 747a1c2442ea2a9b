#!/bin/sh
# Makes the virtual environment of this checkout: sh tools/setup.sh .venv
#
# PYTHON            the interpreter to use; else the first of python3.12, python3.11, python3, python that is 3.11 or 3.12
# RLLM_TORCH_INDEX  package index to take torch from, where the one that pip is set up with should not be used for it
set -eu

venv=$1
root=$(dirname "$0")/..

fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

python=
for candidate in ${PYTHON:-python3.12 python3.11 python3 python}; do
    if fits "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "no Python 3.11 or 3.12 with venv found (tried: ${PYTHON:-python3.12 python3.11 python3 python}); the trainer's verl needs one: install it, or name it: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

# An interrupted setup goes on; an environment of another interpreter does not.
if ! fits "$venv/bin/python"; then
    rm -rf "$venv"
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
# torch first, so that its size is known before it is fetched and everything else settles around it.
"$venv/bin/python" "$root/tools/install_torch.py" "$root/pyproject.toml"

echo "installing the trainer and the tools"
"$venv/bin/python" "$root/tools/install_all.py" "$root[dev]"
touch "$venv/.done"
