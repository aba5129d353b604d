# docker build --target cpu -t skyasync:cpu .    the built-in engine, no vLLM
# docker build --target cuda -t skyasync:cuda .  vLLM; the host needs an NVIDIA driver 580 or newer
#
# docker run --shm-size 16g skyasync:cpu skyasync trainer.max_training_steps=10
# docker run --gpus all --shm-size 64g -v $PWD:/work skyasync:cuda skyasync ...

# This image has a C compiler and Python's headers, with which Triton compiles kernels at run time.
FROM python:3.12 AS base
# The sandbox of code rewards; without it landlock is used.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
COPY . /opt/skyasync
WORKDIR /work

FROM base AS cpu
RUN pip install --no-cache-dir /opt/skyasync

# torch's and vLLM's wheels contain CUDA 13; the driver comes from the host.
FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir "/opt/skyasync[vllm]"
