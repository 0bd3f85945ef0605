#!/bin/bash
# A run as a job of a Ray cluster. The same command again continues a run that was stopped:
#
#   export RAY_API_SERVER_ADDRESS=http://HEAD:8265
#   deploy/ray-job.sh /shared/my.yaml [KEY=VALUE ...]
#
# Ray finds room for node 0, which has the run, for TRAINER_NODES - 1 further nodes of the trainer, each with TRAINER_GPUS
# devices, and for the servers, to which my.yaml gives `launch.resources`.
set -eu
config=$1
shift
nodes=${TRAINER_NODES:-2}
gpus=${TRAINER_GPUS:-8}
# On a disk that all machines see.
run=${RUN:-/shared/runs/$(basename "$config" .yaml)}
# On all machines at this path. Ray's own PATH is not yours.
program=${SPOT_ASYNC:-/shared/spot/bin/spot-async}

words=("training.ranks=$((nodes * gpus))")
if ((nodes > 1)); then
  words+=("cluster.nodes=$nodes" "cluster.resources={GPU: $gpus}")
fi

exec ray job submit --entrypoint-num-gpus "$gpus" -- \
  exec "$program" train --resume auto "$config" "run.directory=$run" cluster.kind=ray "${words[@]}" "$@"
