# The service in a container, without root. By default for CPUs; with a GPU:
#
#     docker build -t specrouter --build-arg TORCH_INDEX= .
#
# TORCH_INDEX is where PyTorch's CPU build comes from; empty, it is the default index's, which
# brings CUDA.
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Kernels for int8 and int4 are compiled at the first start.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '/src[gguf]' \
    && rm -rf /src \
    && useradd --uid 1000 --create-home specrouter \
    && install --directory --owner specrouter /cache

USER 1000
WORKDIR /home/specrouter
ENV SPECROUTER_CACHE=/cache/specrouter HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000

# 503 while models are loaded or downloaded, which may take minutes.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

ENTRYPOINT ["specrouter"]
CMD ["serve", "--host", "0.0.0.0"]
