# What the scripts of this folder share: checks of the allocation, where the ranks meet, and how they are started.
# Sourced at the root of the repository, with `script` as the name of the script and `launcher` as srun or torchrun.
# `prepare` sets nodes, tasks (of a node), gpus (of a node), cpus (of a task), device, and the command `start`.

refuse() {
    echo "$script: $1" >&2
    exit 2
}

prepare() {
    nodes=$SLURM_JOB_NUM_NODES
    tasks=$((SLURM_NTASKS / nodes))
    gpus=${SLURM_GPUS_ON_NODE:-0}
    cpus=${SLURM_CPUS_PER_TASK:-1}
    case $SLURM_TASKS_PER_NODE in
    "$tasks" | "$tasks(x$nodes)") ;; # Slurm writes "8" for one node, "8(x2)" for two alike, "8,4" for two that differ
    *) refuse "$SLURM_NTASKS tasks are not the same number on each of $nodes nodes; give --nodes and --ntasks-per-node" ;;
    esac
    if [ "$gpus" -eq 0 ]; then
        device=cpu # srun may leave the GPUs of other jobs on this node in sight
    elif [ "$gpus" -ne "$tasks" ]; then
        refuse "$tasks tasks and $gpus GPUs per node; give --ntasks-per-node and --gpus-per-node the same number"
    elif [ -n "${SLURM_GPUS_PER_TASK:-}" ]; then
        refuse "--gpus-per-task shows a rank one GPU only, but it picks its own among all of its node; give --gpus-per-node"
    else
        device=cuda
    fi

    # The ranks meet on the first allocated host, which runs rank 0. Each array element has a job id of its own, so that
    # neighbours on one node get different ports; all lie below the range from which systems hand out ports.
    # What was inherited from the shell that submitted does not count.
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*}
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
    unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
    if [ "$nodes" -gt 1 ]; then
        case $MASTER_ADDR in
        "" | localhost | 127.* | ::1) refuse "other nodes cannot reach '$MASTER_ADDR', the first of $SLURM_JOB_NODELIST" ;;
        esac
    fi

    # `start` is the command that runs a Python module on every rank: `"${start[@]}" -m experiments.run ...`
    case $launcher in
    srun)
        export SRUN_CPUS_PER_TASK=$cpus # srun does not take it over from sbatch by itself
        start=(srun --kill-on-bad-exit=1 --label --export=ALL --distribution=block python)
        ;;
    torchrun) # one task a node, which starts the ranks of its node and passes notices on to them
        export SRUN_CPUS_PER_TASK=$((cpus * tasks))
        start=(srun --kill-on-bad-exit=1 --label --export=ALL --ntasks="$nodes" --ntasks-per-node=1
            python -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$tasks" --max-restarts=0
            --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID"
            --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
        ;;
    *) refuse "launcher '$launcher' is not known; give srun or torchrun" ;;
    esac
    echo "job $SLURM_JOB_ID: $nodes x $tasks ranks, $gpus GPUs per node, meeting at $MASTER_ADDR:$MASTER_PORT"
}
