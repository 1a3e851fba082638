#!/bin/sh
# The kernel agent in every task: TaskProlog in slurm.conf, or its lines in the one that you have. Slurm puts what is
# printed as `export NAME=VALUE` into the task's environment.
#
# What the job sets itself stays; GPU_HPC_AGENT_MODE=off in a job keeps the agent off, GPU_HPC_AGENT_RECORDS=kernels makes it cheaper. In containers (Pyxis, Apptainer)
# both paths have to be mounted. Where the library is not there, driver 580.159.04 runs the program as without it; others were not tried.
[ -z "$CUDA_INJECTION64_PATH" ] || exit 0
for agent in /opt/gpu-hpc-exporter/lib/python3.*/site-packages/gpu_hpc_exporter/agent/libgpu_hpc_agent.so; do
    [ -r "$agent" ] || continue
    echo "export CUDA_INJECTION64_PATH=$agent"
    [ -n "$GPU_HPC_AGENT_DIRECTORY" ] || echo "export GPU_HPC_AGENT_DIRECTORY=/run/gpu-hpc-exporter/agents"
    break
done
exit 0
