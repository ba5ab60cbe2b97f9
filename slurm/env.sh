# What a job needs before Python starts: the one place to fit a cluster. Sourced at the root of the repository.

# module load cuda/12.8

if [ -f .venv/bin/activate ]; then
    . .venv/bin/activate
fi

export PYTHONUNBUFFERED=1                           # lines reach the output file when they are printed
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"  # of libraries; those of torch are the config key launch.threads

# The network between nodes, where the default is the wrong one (a host whose name means 127.0.1.1 to itself):
# export GLOO_SOCKET_IFNAME=eth0
# export NCCL_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5
# export NCCL_DEBUG=INFO
