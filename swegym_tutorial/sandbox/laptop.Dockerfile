# The image for tasks that bring their files: Python, git and pytest. Built on the first use, see images.py.
FROM python:3.11-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends git procps \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir --root-user-action=ignore "pytest>=8"
