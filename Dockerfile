# An image that serves a model on an NVIDIA GPU:
#   docker build -t jkvq . && docker run --gpus all -p 8000:8000 -e JKVQ_API_KEY=... jkvq
FROM python:3.12-slim
WORKDIR /jkvq
COPY . .
# pyproject.toml bounds the versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[serve,cuda12]" \
    && useradd --create-home --uid 1000 jkvq \
    && install --directory --owner=jkvq /cache
# Models, calibrations and compiled programs: mount a volume here to keep them.
ENV JKVQ_CACHE=/cache HF_HOME=/cache/huggingface
VOLUME /cache
USER 1000
WORKDIR /home/jkvq
EXPOSE 8000
# A large model takes minutes to load and compile before it listens.
HEALTHCHECK --start-period=15m --interval=30s --timeout=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["jkvq", "serve", "--host", "0.0.0.0"]
