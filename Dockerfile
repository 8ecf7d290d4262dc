# nmrun in a container. On a CPU:   docker build -t nmrun . && docker run --rm -v "$PWD:/work" nmrun recipe=step sparsity=2:8
# On NVIDIA GPUs:                   docker build -t nmrun --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 . && docker run --gpus all ...
# torch's wheels bring CUDA's libraries, so the base has to bring the driver's mounts alone. The base is Debian or Ubuntu with Python 3.11 or newer.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# gcc and the headers: nmrun compiles its CPU kernels, and Triton its launchers, on the machine that they run on
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

# The extras onnx, timm and transformers, each file with the hash that requirements.lock has. Others, such as
# --build-arg EXTRAS=onnx,launchers, or another index, such as torch's own of CPU wheels, which are smaller
# (--build-arg PIP_EXTRA_INDEX_URL=...), have other files: then the versions of constraints.txt without hashes.
ARG EXTRAS
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/nmrun
COPY pyproject.toml constraints.txt requirements.lock README.md LICENSE ./
COPY conf conf
COPY nmrun nmrun
RUN python3 -m venv /opt/venv \
 && if [ -n "$EXTRAS$PIP_EXTRA_INDEX_URL" ]; \
    then /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS:-onnx,timm,transformers}]"; \
    else /opt/venv/bin/pip install --no-cache-dir --require-hashes --requirement requirements.lock \
      && /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation .; \
    fi

ENV PATH=/opt/venv/bin:$PATH NMRUN_DATA=/data
WORKDIR /work
ENTRYPOINT ["nmrun"]
CMD ["--help"]
