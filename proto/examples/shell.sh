#!/bin/sh
# From a shell: sh proto/examples/shell.sh [host:port]
# Needs `selfdraft` and its `python` on the PATH, as in an activated virtual environment.
set -eu
target=${1:-127.0.0.1:50051}
here=$(dirname "$0")

# A text, streamed to standard output; the summary goes to standard error.
selfdraft generate 'def fib(n):' --target "$target" --max-tokens 32 --timeout 60

# In a pipe: the prompt from standard input, the same text every time, no summary.
echo 'Once upon a time' |
    selfdraft generate - --target "$target" --max-tokens 16 --temperature 0 --seed 7 2>/dev/null |
    tr '[:lower:]' '[:upper:]'

# A refusal is an exit code. Three tries, then give up.
tries=3
until selfdraft generate 'A point: ' --target "$target" --session-id shell --max-tokens 8 --timeout 30; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || exit 1
    sleep 2
done

# Any method by its name, by reflection (grpcurl does the same).
python "$here/call.py" "$target"
python "$here/call.py" "$target" selfdraft.v1.Inference/GetModelInfo
python "$here/call.py" "$target" selfdraft.v1.Inference/Tokenize '{"text": "def fib(n):"}'
