#!/bin/sh
# SGLang for tests on a CPU, in the environment given as first argument: 2 GB instead of the 11 GB of its full set.
# The last two lines take no dependencies: with them, pip would swap the CPU build of torch for a CUDA one.
set -eu
venv=$1
here=$(dirname "$0")
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q "${TORCH:-torch==2.13.0}"
"$venv/bin/pip" install -q "setuptools>=77" -r "$here/requirements.txt"
"$venv/bin/pip" install -q --no-deps triton==3.6.0 sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7
"$venv/bin/pip" install -q --no-deps --no-build-isolation -e "$here/../.."
