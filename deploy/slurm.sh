#!/bin/bash
# A gate and capture workers as one SLURM job: a worker on each node, the gate beside the first.
#
#   LAKE=/shared/lake MODEL=org/model sbatch deploy/slurm.sh --tensor-parallel-size 8
#
# Arguments go to every worker, as vLLM's own. The lake and both environments lie on a file system that all nodes share.
# The gate's address and its control token are left in $LAKE.gate and $LAKE.token, for the trainer's job to read.
#SBATCH --job-name=tokenlake
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=tokenlake-%j.log
set -euo pipefail

: "${LAKE:?LAKE names a folder on the shared file system}" "${MODEL:?MODEL names what the workers serve}"
VENV=${VENV:-.venv}
VENV_VLLM=${VENV_VLLM:-.venv-vllm}
GATE_PORT=${GATE_PORT:-8000}
WORKER_PORT=${WORKER_PORT:-8001}
START_S=${START_S:-1800}

# Secrets are made once for each lake, readable by this user only, and travel in the environment: `ps` shows arguments.
umask 077
[ -s "$LAKE.token" ] || openssl rand -hex 32 >"$LAKE.token"
[ -s "$LAKE.key" ] || openssl rand -hex 32 >"$LAKE.key"
[ -s "$LAKE.worker" ] || openssl rand -hex 32 >"$LAKE.worker"
TOKENLAKE_TOKEN=$(cat "$LAKE.token")
TOKENLAKE_CAPABILITY_KEY=$(cat "$LAKE.key")
TOKENLAKE_UPSTREAM_KEY=$(cat "$LAKE.worker")
export TOKENLAKE_TOKEN TOKENLAKE_CAPABILITY_KEY TOKENLAKE_UPSTREAM_KEY VLLM_API_KEY=$TOKENLAKE_UPSTREAM_KEY

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

started=()
stop() {
    # The gate first: it takes no more calls, seals what it wrote, and lets the lake go.
    local pid
    for pid in "${started[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    wait
}
trap stop EXIT
trap 'exit 143' TERM INT

answers() {
    # Whether a URL answers before START_S have passed; the process behind it must live meanwhile.
    local url=$1 pid=$2 waited
    for ((waited = 0; waited < START_S; waited += 2)); do
        curl --silent --fail --output /dev/null --max-time 5 "$url" && return 0
        kill -0 "$pid" 2>/dev/null || break
        sleep 2
    done
    echo "$url did not answer: the log above says why" >&2
    return 1
}

workers=()
for i in "${!nodes[@]}"; do
    srun --nodes=1 --ntasks=1 --nodelist="${nodes[$i]}" --kill-on-bad-exit=1 \
        "$VENV_VLLM/bin/tokenlake" worker --lake "$LAKE" --worker-id "worker-$i" --model "$MODEL" --port "$WORKER_PORT" "$@" &
    workers+=($!)
done
started=("${workers[@]}")
for i in "${!nodes[@]}"; do answers "http://${nodes[$i]}:$WORKER_PORT/health" "${workers[$i]}"; done

"$VENV/bin/tokenlake" serve --lake "$LAKE" --upstream "http://${nodes[0]}:$WORKER_PORT" --capture worker \
    --host 0.0.0.0 --port "$GATE_PORT" &
gate=$!
started=("$gate" "${workers[@]}")
answers "http://127.0.0.1:$GATE_PORT/readyz" "$gate"

for i in "${!nodes[@]}"; do
    [ "$i" = 0 ] && continue
    curl --silent --show-error --fail --output /dev/null -X PUT "http://127.0.0.1:$GATE_PORT/api/v1/workers/worker-$i" \
        -H @<(echo "Authorization: Bearer $TOKENLAKE_TOKEN") -d "{\"url\": \"http://${nodes[$i]}:$WORKER_PORT\"}"
done
echo "http://$(hostname):$GATE_PORT" >"$LAKE.gate"
echo "gate at $(cat "$LAKE.gate"), ${#nodes[@]} workers, lake $LAKE"

# One that ends takes the job with it: SLURM requeues a job, not a process of it.
wait -n "${started[@]}"
