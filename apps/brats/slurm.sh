#!/bin/bash
# Train on several nodes under SLURM; what the time limit or a preemption cuts off is requeued and goes on.
#   sbatch --nodes 2 --gpus-per-node 8 apps/brats/slurm.sh runs/brats/big --data data/Task01_BrainTumour --parallel.partitions 16
#SBATCH --job-name=medspeed-brats
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# TERM goes to torchrun two minutes before the end; it hands it on, and all ranks finish the step, save and leave.
set -uo pipefail
run=$1
shift
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -e "$run/config.yaml" ]; then  # with or without a checkpoint
    set -- --resume "$run"
else
    set -- --run "$run" "$@"
fi
port=$((20000 + SLURM_JOB_ID % 40000))  # of its own: two jobs may share their first node
threads=$((${SLURM_CPUS_PER_TASK:-1} / ${SLURM_GPUS_ON_NODE:-1}))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
before=$(readlink "$run/checkpoints/last")
# shellcheck disable=SC2016 # SLURM_NODEID is each node's own, so it is read there
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '.venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --node-rank "$SLURM_NODEID" --master-addr '"$first"' --master-port '"$port"' --max-restarts 0 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -- apps/brats/train.py "$@"' train "$@"
status=$?
# The run is whole once its summary is there; what left without one, after a checkpoint of its own, goes on in a new job.
if [ $status -ne 0 ] && [ "$(readlink "$run/checkpoints/last")" != "$before" ] && [ ! -e "$run/summary.json" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
