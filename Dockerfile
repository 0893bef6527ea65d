# An image that serves a model on an NVIDIA GPU:
#   docker build -t jkvq . && docker run --gpus all -p 8000:8000 -e JKVQ_API_KEY=... jkvq
FROM python:3.12-slim
WORKDIR /jkvq
COPY . .
RUN pip install --no-cache-dir ".[serve,cuda12]"
# Models, calibrations and compiled programs: mount a volume here to keep them.
ENV JKVQ_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["jkvq", "serve", "--host", "0.0.0.0"]
